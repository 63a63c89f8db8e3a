// The calculator agent in JavaScript with the package `openai`, over Chat Completions.

import { pathToFileURL } from "node:url";

import OpenAI from "openai";

const parameters = { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] };
const description = "Computes one arithmetic operation.";
const tools = [{ type: "function", function: { name: "calculator", description, parameters } }];

function calculator(json) {
  try {
    const { expression } = JSON.parse(json);
    const [, left, sign, right] = /^\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*$/.exec(expression);
    const [a, b] = [BigInt(left), BigInt(right)];
    return String(sign === "+" ? a + b : sign === "-" ? a - b : a * b);
  } catch {
    return "Error: only one operation per call";
  }
}

// Without URL and key the client reads OPENAI_BASE_URL and OPENAI_API_KEY.
export async function solve(messages, model, access = {}) {
  const client = new OpenAI(access);
  for (let turn = 0; turn < 4; turn++) {
    const { message } = (await client.chat.completions.create({ model, messages, tools })).choices[0];
    if (!message.tool_calls?.length) return;
    const results = message.tool_calls.map((call) => ({
      role: "tool",
      tool_call_id: call.id,
      content: calculator(call.function.arguments),
    }));
    messages = [...messages, message, ...results];
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  await solve(JSON.parse(process.env.TURNWISE_TASK).messages, process.env.TURNWISE_MODEL);
}
