// The JSON API of the server, version 1; docs/how-to/view-a-run.md describes it.
import { answer, isExported, type Parameters } from "./exported";

export interface Run {
  name: string;
  path: string;
  num_episodes: number;
  /** In an exported page: the episodes that the run had, with the ones that were left out. */
  num_all?: number;
  /** False while `turnwise view --live` waits for the run. */
  has_started: boolean;
  is_partial: boolean;
  num_running: number;
  /** Changes with the running episodes, at most once a second. */
  running_revision: string;
  revision: string;
  error: string | null;
  has_metrics: boolean;
  has_trace: boolean;
}

export interface EpisodeRow {
  key: string;
  uid: string;
  rollout_n: number;
  global_step: number;
  validation: boolean;
  sample_index: number;
  agent_name: string;
  data_source: string;
  status: string;
  fault_owner: string | null;
  reward: number | null;
  num_turns: number;
  num_tool_calls: number;
  num_tool_errors: number;
  num_records: number;
  prompt_tokens: number;
  action_tokens: number;
  response_tokens: number;
  total_s: number;
  llm_s: number;
  tool_s: number;
  reward_s: number;
  difference?: number | null;
  advantage?: number | null;
}

export interface EpisodePage {
  /** So far, while a search has not read every episode; `at_most` counts the ones that may have the text as well. */
  total: number;
  at_most: number;
  searched: number;
  /** Whether the search changes nothing more in `episodes`. */
  settled: boolean;
  episodes: EpisodeRow[];
}

export interface RunningEpisode {
  key: string;
  agent_name: string;
  worker: string;
  num_turns: number;
  num_tokens: number;
  /** The last event: `start`, `turn`, `tool NAME` or `reward`. */
  last: string;
  /** Since its start, and since the last event, when the server answered. */
  seconds: number;
  last_s: number;
}

export interface RunningPage {
  total: number;
  episodes: RunningEpisode[];
}

export interface Segment {
  origin: string;
  start: number;
  stop: number;
  block: number;
  path: number;
}

export interface Lineage {
  parent: number | null;
  num_shared_tokens: number;
  kind: string;
  label: string;
  trained: boolean;
}

export interface TokenScore {
  level: string;
  at: string | null;
  values: number[];
  extra: Record<string, number>;
  credits: [number, number][];
}

export type Turn = [start: number, stop: number];

export interface EpisodeRecord {
  index: number;
  lineage: Lineage | null;
  num_prompt_tokens: number;
  num_tokens: number;
  segments: Segment[];
  turns: Turn[];
  prompt_text: string | null;
  response_text: string | null;
  score: TokenScore | null;
}

export interface ToolCall {
  id?: string;
  function?: { name?: string; arguments?: unknown };
}

export interface Message {
  role?: string;
  content?: unknown;
  name?: string;
  tool_calls?: ToolCall[];
  reasoning_content?: unknown;
}

/** A call of the agent's program to another model than the policy; no record has it. */
export interface OutsideCall {
  model: string;
  path: string;
  /** 0 when there was no response. */
  status: number;
  /** The bodies, as they were sent. */
  request: string;
  response: string;
  /** Turns of the policy before it. */
  num_turns: number;
  messages: Message[];
  answer: string;
}

/** A text for people about an episode, of a tool, an agent or a reward: a command with its output, a report of tests. */
export interface Report {
  title: string;
  text: string;
  facts: Record<string, string | number>;
  failed: boolean;
  /** Turns of the policy before it. */
  num_turns: number;
}

export interface Episode {
  key: string;
  uid: string;
  rollout_n: number;
  global_step: number;
  validation: boolean;
  status: string;
  objective: string;
  agent_name: string;
  data_source: string;
  sample_index: number;
  worker: string;
  /** Of the engine; null in a file of an earlier version. */
  replicas: number[] | null;
  reward: number | null;
  /** The limit that ended it; null without one, and in a file of an earlier version. */
  limit: { name: string; value: number | null; reason: string } | null;
  fault: { owner: string; kind: string; message: string; traceback: string } | null;
  task: { messages: Message[]; ground_truth: unknown; agent_name: string; extra: Record<string, unknown> };
  messages: Message[];
  outside_calls: OutsideCall[];
  reports: Report[];
  metrics: Record<string, number> & { num_tokens: Record<string, number>; extra: Record<string, number> };
  records: EpisodeRecord[];
  /** The files of its pictures by their names: the size, and why one cannot be shown. */
  pictures: Record<string, { bytes: number; problem: string | null }>;
  /** Most response tokens of a record; null if the run has no config. */
  response_budget: number | null;
  /** Most tokens of a turn; null if the config of the run sets none. */
  turn_limit: number | null;
}

export interface Tokens {
  num_prompt_tokens: number;
  ids: number[];
  pieces: string[] | null;
  no_pieces_because: string | null;
  origin_names: string[];
  origins: number[];
  mask: number[];
  logprobs: (number | null)[];
  weight_versions: (number | null)[];
  position_ids: number[];
  block_start: number[];
  path_start: number[];
  advantages: (number | null)[] | null;
  /** Columns of plugins: the value of each token as text, null where it has none. */
  open_columns: Record<string, (string | null)[]>;
  /** The first placeholder of each picture, the number of its placeholders, and its file. */
  pictures: [start: number, length: number, name: string][];
}

export interface Group {
  uid: string;
  global_step: number;
  validation: boolean;
  sample_index: number;
  data_source: string;
  mean: number | null;
  min: number | null;
  max: number | null;
  std: number | null;
  no_variance: boolean;
  episodes: EpisodeRow[];
}

export interface Metrics {
  series: Record<string, Series> | null;
  /** The first line of the log that cannot be read. */
  problem: string | null;
}

export interface Series {
  steps: number[];
  values: (number | null)[];
}

/** A block of neighbouring slices has their number, and a key if all are of one episode. */
export type Slice = [start: number, seconds: number, category: string, name: string, key: string | null, count?: number];

export interface Timeline {
  seconds: number;
  rows: { name: string; slot: number; slices: Slice[] }[];
  /** The longest episode. */
  longest: Slice | null;
  /** Slices that are in blocks. */
  num_merged: number;
  /** Rows that are left out. */
  num_hidden_rows: number;
}

export async function get<T>(path: string, parameters: Parameters = {}, signal?: AbortSignal): Promise<T> {
  if (isExported) return (await answer(path, parameters)) as T;
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== "") query.append(name, String(each));
    }
  }
  const response = await fetch(`api/v1/${path}?${query}`, { signal });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ?? `status ${response.status}`);
  return body as T;
}
