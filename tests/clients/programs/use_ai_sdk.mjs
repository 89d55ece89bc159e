// The AI SDK with its provider for compatible servers; prints what it found as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "dflash",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider.chatModel("dflash-demo");
const schema = z.object({ isLarge: z.boolean(), district: z.string().max(5) });
const prompt = "hello";
const short = { model, prompt, maxOutputTokens: 10, seed: 1 };
const long = { model, prompt, maxOutputTokens: 200 };
const weather = tool({
  inputSchema: z.object({ city: z.string().max(5) }),
  execute: async ({ city }) => `${city}: 3`,
});
const forced = { tools: { weather }, toolChoice: { type: "tool", toolName: "weather" } };

async function joined(stream) {
  let text = "";
  for await (const part of stream) text += part;
  return text;
}

const found = {};
const whole = await generateText(short);
found.whole = whole.text;
found.usage = whole.usage.outputTokens;
found.streamed = await joined(streamText(short).textStream);
const agent = await generateText({
  ...long,
  ...forced,
  prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {}),
  stopWhen: stepCountIs(2),
});
found.steps = agent.steps.map((step) => [step.toolCalls.length, step.finishReason]);
found.results = agent.steps[0].toolResults.map((result) => result.output);
const calls = streamText({ ...long, ...forced });
found.events = [];
for await (const part of calls.fullStream) found.events.push(part.type);
found.objects = [
  (await generateObject({ ...long, schema })).object,
  (await generateText({ ...long, output: Output.object({ schema }) })).output,
];
const parts = streamObject({ ...long, schema });
for await (const _ of parts.partialObjectStream);
found.objects.push(await parts.object);
found.choice = (await generateObject({ ...long, output: "enum", enum: ["a", "b"] })).object;
const completion = { ...short, model: provider.completionModel("dflash-demo"), prompt: "def " };
found.completion = (await generateText(completion)).text;
found.completed = await joined(streamText(completion).textStream);
const stop = new AbortController();
const aborted = streamText({ model, prompt, abortSignal: stop.signal, onError() {} });
found.before = 0;
for await (const _ of aborted.textStream) if (++found.before === 3) stop.abort();
try {
  const image = { type: "image", image: new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10]) };
  await generateText({ model, messages: [{ role: "user", content: [image] }], maxRetries: 0 });
} catch (error) {
  found.image = [error.statusCode, error.message];
}
console.log(JSON.stringify(found));
