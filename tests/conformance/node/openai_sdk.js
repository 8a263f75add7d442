// OpenAI's Node SDK. Arguments: the address of `caller`, that of the built-in pair. Prints one JSON object.
import OpenAI from 'openai';
import { zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const [caller, pair] = process.argv.slice(2, 4).map((url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none' }));
const messages = [{ role: 'user', content: 'How is the weather?' }];
const asked = [];
const tools = [{
  type: 'function',
  function: {
    name: 'get_weather',
    parameters: { type: 'object', properties: { city: { type: 'string' } } },
    parse: JSON.parse,
    function: ({ city }) => { asked.push(city); return 'Sunny'; },
  },
}];
const runner = caller.chat.completions.runTools({ model: 'caller', messages, tools, temperature: 0 });
const whole = await runner.finalContent();
const streaming = caller.chat.completions.runTools({ model: 'caller', messages, tools, temperature: 0, stream: true });
const streamed = await streaming.finalContent();

const person = z.object({ name: z.enum(['Ann', 'Bob']), age: z.int().min(1).max(9) });
const answer = await pair.chat.completions.parse({
  model: 'smollm2', messages: [{ role: 'user', content: 'Bob is 7 years old. Answer in JSON.' }],
  response_format: zodResponseFormat(person, 'person'), temperature: 0, max_tokens: 100,
});
console.log(JSON.stringify({ asked, whole, streamed, output: answer.choices[0].message.parsed }));
