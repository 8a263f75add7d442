// The `ai` SDK. Arguments: the address of `caller`, that of the built-in pair, texts. Prints one JSON object.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [caller, pair] = process.argv.slice(2, 4).map((url) =>
  createOpenAICompatible({ name: 'ssd', baseURL: `${url}/v1`, supportsStructuredOutputs: true, includeUsage: true }));
const asked = [];
const tools = {
  get_weather: tool({
    description: 'The weather of a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => { asked.push(city); return 'Sunny'; },
  }),
};
const loop = {
  model: caller('caller'), tools, stopWhen: stepCountIs(3), temperature: 0, prompt: 'How is the weather?',
};
const whole = await generateText(loop);
const streamed = streamText(loop);
let text = '';
for await (const part of streamed.textStream) text += part;

function describe(prompt, schema) {
  const output = Output.object({ schema });
  return generateText({ model: pair('smollm2'), output, temperature: 0, maxOutputTokens: 100, prompt });
}
const schema = z.object({ name: z.enum(['Ann', 'Bob']), age: z.int().min(1).max(9) });
const { output, usage } = await describe('Bob is 7 years old. Answer in JSON.', schema);

// Without limits, for each text of the command line: only the prompt tells what is right.
const anyPerson = z.object({ name: z.string(), age: z.int() });
const told = [];
for (const text of process.argv.slice(4)) told.push(await describe(text, anyPerson).then((said) => said.output, String));
console.log(JSON.stringify({
  asked, whole: whole.text, streamed: text, output, tokens: usage.outputTokens, reasoning: whole.steps[0].reasoningText,
  told,
}));
