// An agent on the npm package `openai`: arguments and output as of the other clients. It runs in the client's folder.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(process.cwd() + "/").href);
const { OpenAI } = require("openai");

const [url, key, dialect, stream] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
const parameters = { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } };

const add = (text) => {
  const { a, b } = JSON.parse(text);
  return String(a + b);
};

async function chat() {
  const messages = [{ role: "user", content: "Add 1 and 2." }];
  const tools = [{ type: "function", function: { name: "add", description: "Add two numbers.", parameters } }];
  for (;;) {
    const request = { model: "tiny", messages, tools };
    const completion =
      stream === "stream"
        ? await client.chat.completions.stream(request).finalChatCompletion()
        : await client.chat.completions.create(request);
    const message = completion.choices[0].message;
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls) {
      messages.push({ role: "tool", tool_call_id: call.id, content: add(call.function.arguments) });
    }
  }
}

async function responses() {
  const input = [{ role: "user", content: "Add 1 and 2." }];
  const tools = [{ type: "function", name: "add", description: "Add two numbers.", parameters }];
  for (;;) {
    const request = { model: "tiny", input, tools, store: false };
    const response =
      stream === "stream"
        ? await client.responses.stream(request).finalResponse()
        : await client.responses.create(request);
    input.push(...response.output);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) return response.output_text ?? response.output.at(-1).content[0].text;
    for (const call of calls) {
      input.push({ type: "function_call_output", call_id: call.call_id, output: add(call.arguments) });
    }
  }
}

try {
  console.log(JSON.stringify({ answer: await (dialect === "responses" ? responses() : chat()) }));
} catch (error) {
  console.log(JSON.stringify({ error: `${error.constructor.name}: ${error.message}` }));
}
