// An agent on the Vercel AI SDK: arguments and output as of the other clients. It runs in the client's folder.
// The default model of the provider is that of Responses, which names items of earlier responses in place of sending them.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(process.cwd() + "/").href);
const { generateText, streamText, stepCountIs, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { z } = require("zod");

const [url, key, dialect, stream] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const request = {
  model: dialect === "chat" ? openai.chat("tiny") : openai("tiny"),
  prompt: "Add 1 and 2.",
  tools: { add },
  stopWhen: stepCountIs(5),
};

try {
  let failed;
  const result =
    stream === "stream" ? streamText({ ...request, onError: ({ error }) => (failed = error) }) : await generateText(request);
  const answer = await result.text;
  if (failed) throw failed;
  console.log(JSON.stringify({ answer }));
} catch (error) {
  console.log(JSON.stringify({ error: `${error.constructor.name}: ${error.message}` }));
}
