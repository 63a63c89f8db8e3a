// An agent of Mastra: arguments and output as of the other clients. It runs in the client's folder.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(process.cwd() + "/").href);
const { Agent } = require("@mastra/core/agent");
const { createTool } = require("@mastra/core/tools");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

const [url, key, , stream] = process.argv.slice(2);
const add = createTool({
  id: "add",
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
});
const model = createOpenAICompatible({ name: "gateway", baseURL: `${url}/v1`, apiKey: key })("tiny");
const agent = new Agent({ id: "adder", name: "adder", instructions: "You add.", model, tools: { add } });

const answer =
  stream === "stream" ? await (await agent.stream("Add 1 and 2.")).text : (await agent.generate("Add 1 and 2.")).text;
// The text of all turns, and not of the last one alone.
console.log(JSON.stringify({ answer: answer.trim().replace(/^Let me add\./, "").trim() }));
