// Anthropic's Node SDK. Argument: the address of `caller`. Prints one JSON object.
import Anthropic from '@anthropic-ai/sdk';

const client = new Anthropic({ baseURL: process.argv[2], apiKey: 'none', maxRetries: 0 });
const messages = [{ role: 'user', content: 'How is the weather?' }];
const tools = [{
  name: 'get_weather',
  input_schema: { type: 'object', properties: { city: { type: 'string' } } },
}];
const given = { model: 'claude-opus-4-8', max_tokens: 300, tools };

const asked = [];
let answer = await client.messages.create({ ...given, messages });
while (answer.stop_reason === 'tool_use') {
  const calls = answer.content.filter((block) => block.type === 'tool_use');
  asked.push(...calls.map((call) => call.input.city));
  const results = calls.map(({ id }) => ({ type: 'tool_result', tool_use_id: id, content: 'Sunny' }));
  messages.push({ role: 'assistant', content: answer.content }, { role: 'user', content: results });
  answer = await client.messages.create({ ...given, messages });
}

const question = messages.slice(0, 1);
const final = await client.messages.stream({ ...given, messages: question }).finalMessage();
const counted = await client.messages.countTokens({ model: 'caller', messages: question, tools });
const [model] = (await client.models.list()).data;
const error = await client.messages.create({ ...given, model: 'gpt-9', messages: question }).catch((error) => error);
console.log(JSON.stringify({
  asked,
  last: answer.content.filter((block) => block.type !== 'thinking'),
  reason: answer.stop_reason,
  streamed: final.content.map((block) => block.type),
  counted: counted.input_tokens,
  prompt: final.usage.input_tokens + final.usage.cache_read_input_tokens,
  model: model.id,
  error: error.constructor.name,
  type: error.error.error.type,
}));
