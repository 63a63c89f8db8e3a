// An agent of the OpenAI Agents SDK for JavaScript: arguments and output as of the other clients.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(process.cwd() + "/").href);
const { Agent, OpenAIProvider, Runner, tool } = require("@openai/agents");
const { z } = require("zod");

const [url, key, dialect, stream] = process.argv.slice(2);
const modelProvider = new OpenAIProvider({ baseURL: `${url}/v1`, apiKey: key, useResponses: dialect === "responses" });
const add = tool({
  name: "add",
  description: "Add two numbers.",
  parameters: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => String(a + b),
});
const agent = new Agent({ name: "Adder", instructions: "You add.", model: "tiny", tools: [add] });
const runner = new Runner({ modelProvider, tracingDisabled: true });

const result = await runner.run(agent, "Add 1 and 2.", { stream: stream === "stream" });
if (stream === "stream") await result.completed;
console.log(JSON.stringify({ answer: result.finalOutput }));
