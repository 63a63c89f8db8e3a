// Leases episodes of a run, and solves many of them at once: `node worker.mjs CONTROL_FILE`.
// It ends when it is interrupted: the control port is closed while a training updates the weights.

import { readFile } from "node:fs/promises";
import { setTimeout as sleep } from "node:timers/promises";

import { solve } from "./agent.mjs";

const AT_ONCE = 64;
const [file] = process.argv.slice(2);

async function post(path, body) {
  const access = JSON.parse(await readFile(file, "utf8"));
  const headers = { Authorization: `Bearer ${access.secret}`, "Content-Type": "application/json" };
  const response = await fetch(access.url + path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!response.ok) throw Object.assign(new Error(await response.text()), { status: response.status });
  return response.status === 204 ? undefined : response.json();
}

async function solveLeased({ lease, task, session }) {
  let [path, body] = ["complete", {}];
  try {
    await solve(task.messages, session.model, { baseURL: session.openai_base_url, apiKey: session.api_key });
  } catch (error) {
    [path, body] = ["fail", { reason: String(error) }];
  }
  try {
    await post(`/leases/${lease.id}/${path}`, { fence: lease.fence, ...body });
  } catch (error) {
    // The run ended the episode first, for example because its budget is spent.
    console.error(`lease ${lease.id}: ${path} came too late: ${error}`);
  }
}

const running = new Set();
for (;;) {
  if (running.size >= AT_ONCE) await Promise.race(running);
  try {
    const leased = await post("/tasks/lease", { worker: "example", wait_s: 10 });
    if (!leased) continue;
    const episode = solveLeased(leased).finally(() => running.delete(episode));
    running.add(episode);
  } catch (error) {
    if (error.status) throw error; // such as 401 for a wrong secret
    await sleep(100); // no port is open now
  }
}
