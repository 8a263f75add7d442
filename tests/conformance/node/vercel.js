// The `ai` SDK with its default provider for OpenAI, which asks for responses. Prints one JSON object.
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [caller, pair] = process.argv.slice(2, 4).map((url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' }));
const asked = [];
const tools = {
  get_weather: tool({
    description: 'The weather of a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => { asked.push(city); return 'Sunny'; },
  }),
};
const loop = { model: caller('caller'), tools, stopWhen: stepCountIs(3), temperature: 0, prompt: 'How is the weather?' };
const whole = await generateText(loop);
const streaming = streamText(loop);
let streamed = '';
for await (const part of streaming.textStream) streamed += part;

function describe(prompt, schema) {
  const output = Output.object({ schema });
  return generateText({ model: pair('smollm2'), output, temperature: 0, maxOutputTokens: 100, prompt });
}
const schema = z.object({ name: z.enum(['Ann', 'Bob']), age: z.int().min(1).max(9) });
const { output } = await describe('Bob is 7 years old. Answer in JSON.', schema);

// Without limits, for each text of the command line: only the prompt tells what is right.
const anyPerson = z.object({ name: z.string(), age: z.int() });
const told = [];
for (const text of process.argv.slice(4)) told.push(await describe(text, anyPerson).then((said) => said.output, String));
console.log(JSON.stringify({ asked, whole: whole.text, streamed, output, told }));
