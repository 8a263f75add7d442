// Ollama's Node client. Arguments: the address of `caller`, that of the built-in pair. Prints one JSON object.
import { Ollama } from 'ollama';

const [caller, pair] = process.argv.slice(2, 4).map((host) => new Ollama({ host }));
const asked = [];
const tools = [{
  type: 'function',
  function: {
    name: 'get_weather', description: 'The weather of a city.',
    parameters: { type: 'object', required: ['city'], properties: { city: { type: 'string' } } },
  },
}];
async function talk(stream) {
  const messages = [{ role: 'user', content: 'How is the weather?' }];
  for (;;) {
    const answer = await caller.chat({ model: 'caller', messages, tools, stream, options: { temperature: 0 } });
    const parts = [];
    if (stream) for await (const part of answer) parts.push(part.message);
    else parts.push(answer.message);
    const calls = parts.flatMap((part) => part.tool_calls ?? []);
    const content = parts.map((part) => part.content).join('');
    if (!calls.length) return content;
    messages.push({ role: 'assistant', content, tool_calls: calls });
    for (const call of calls) {
      asked.push(call.function.arguments.city);
      messages.push({ role: 'tool', tool_name: call.function.name, content: 'Sunny' });
    }
  }
}
const [whole, streamed] = [await talk(false), await talk(true)];

const format = {
  type: 'object', required: ['name', 'age'],
  properties: { name: { enum: ['Ann', 'Bob'] }, age: { type: 'integer', minimum: 1, maximum: 9 } },
};
const { response } = await pair.generate({
  model: 'smollm2', prompt: 'Bob is 7 years old. Answer in JSON.', format, options: { temperature: 0 },
});
const { models } = await pair.list();
const { capabilities } = await pair.show({ model: models[0].name });
const refused = await pair.chat({ model: 'nonesuch' }).catch((error) => error.status_code);
console.log(JSON.stringify({
  asked, whole, streamed, output: JSON.parse(response), capabilities, refused, version: (await pair.version()).version,
}));
