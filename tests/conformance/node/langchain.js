// LangChain for Node. Arguments: the address of `caller`, that of the built-in pair, texts. Prints one JSON object.
import { HumanMessage, ToolMessage } from '@langchain/core/messages';
import { tool } from '@langchain/core/tools';
import { ChatOpenAI } from '@langchain/openai';
import { z } from 'zod';

const [caller, pair] = process.argv.slice(2, 4).map((url, index) => new ChatOpenAI({
  model: ['caller', 'smollm2'][index], apiKey: 'none', temperature: 0, maxTokens: 100,
  configuration: { baseURL: `${url}/v1` },
}));
const asked = [];
const getWeather = tool(({ city }) => { asked.push(city); return 'Sunny'; }, {
  name: 'get_weather', description: 'The weather of a city.', schema: z.object({ city: z.string() }),
});
const agent = caller.bindTools([getWeather]);

async function answer(ask) {
  const messages = [new HumanMessage('How is the weather?')];
  for (;;) {
    const said = await ask(messages);
    if (!said.tool_calls.length) return said.content;
    messages.push(said);
    for (const call of said.tool_calls) messages.push(await getWeather.invoke(call));
  }
}

const whole = await answer((messages) => agent.invoke(messages));
const streamed = await answer(async (messages) => {
  let all;
  for await (const part of await agent.stream(messages)) all = all ? all.concat(part) : part;
  return all;
});
const person = z.object({ name: z.enum(['Ann', 'Bob']), age: z.int().min(1).max(9) });
const output = await pair.withStructuredOutput(person, { name: 'person' }).invoke('Bob is 7 years old. Answer in JSON.');

// Without limits, for each text of the command line: only the prompt tells what is right.
const anyPerson = pair.withStructuredOutput(z.object({ name: z.string(), age: z.int() }), { name: 'person' });
const told = [];
for (const text of process.argv.slice(4)) told.push(await anyPerson.invoke(text).catch(String));
console.log(JSON.stringify({ asked, whole, streamed, output, told }));
