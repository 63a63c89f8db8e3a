// The answers of the API in an exported page: each is in an element of the page, compressed and in base64.
import type { Episode, EpisodePage, EpisodeRow, Group, Slice } from "./api";
import { bound, type WholeTimeline } from "./bounds";

export type Parameters = Record<string, string | number | string[] | undefined>;

const blocks = new Map([...document.querySelectorAll<HTMLElement>("script[data-name]")].map((each) => [each.dataset.name!, each]));

/** Whether this page is a file, which has no server. */
export const isExported = blocks.size > 0;

async function read<T>(name: string): Promise<T> {
  const text = blocks.get(name)?.textContent;
  if (!text) throw new Error(`this file has no ${name}`);
  const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text()) as T;
}

/** The `data:` URL of a picture of a run; null if the file was written without it. */
export async function readPicture(run: number, name: string): Promise<string | null> {
  const block = `picture/${run}/${name}`;
  return blocks.has(block) ? (await read<{ url: string }>(block)).url : null;
}

/** Answer a request as the server does. */
export async function answer(path: string, parameters: Parameters): Promise<unknown> {
  const [, run, what] = path.split("/");
  if (path === "runs") return read("runs");
  if (what === "metrics") return read(`metrics/${run}`);
  if (what === "groups") return listGroups(run, parameters);
  const { rows } = await read<{ rows: EpisodeRow[] }>(`rows/${run}`);
  if (what === "episodes") return listEpisodes(run, rows, parameters);
  if (what === "timeline") {
    const { timeline } = await read<{ timeline: WholeTimeline | null }>(`timeline/${run}`);
    return { timeline: timeline && bound(chooseSlices(timeline, rows, parameters)) };
  }
  const number = rows.findLastIndex((each) => each.key === parameters.key);
  if (number < 0) throw new Error(`this file has no episode '${parameters.key}': it was exported without it`);
  if (what === "case") {
    const found = await read<{ source?: string; problem?: string }>(`case/${run}/${number}`);
    if (found.problem) throw new Error(found.problem);
    return found;
  }
  return read(what === "tokens" ? `tokens/${run}/${number}/${parameters.record ?? 0}` : `${what}/${run}/${number}`);
}

/** Keep the slices of an episode or of a step, and those of no episode between their first and last. */
function chooseSlices(timeline: WholeTimeline, rows: EpisodeRow[], wanted: Parameters): WholeTimeline {
  if (!(given(wanted.key) || given(wanted.step))) return timeline;
  const step = wanted.step === "last" ? rows.reduce((newest, each) => Math.max(newest, each.global_step), -Infinity) : Number(wanted.step);
  const keys = new Set(given(wanted.key) ? [wanted.key] : rows.filter((each) => each.global_step === step).map((each) => each.key));
  const found = timeline.rows.flatMap((row) => row.slices).filter((each) => keys.has(each[4] ?? ""));
  const [start, end] = endsOf(found);
  const keepsSlice = (each: Slice) => (each[2] === "memory" ? each[0] < end && each[0] + each[1] > start : keys.has(each[4] ?? ""));
  const all = timeline.rows.map((row) => ({ ...row, slices: row.slices.filter(keepsSlice) })).filter((row) => row.slices.length > 0);
  if (all.length === 0) return { seconds: 0, rows: [] };
  const [first, last] = endsOf(all.flatMap((row) => row.slices));
  const moved = all.map((row) => ({ ...row, slices: row.slices.map(([at, ...rest]): Slice => [at - first, ...rest]) }));
  return { seconds: last - first, rows: moved };
}

/** The first start and the last end; a loop, because a call takes no more arguments than some ten thousands. */
function endsOf(slices: Slice[]): [number, number] {
  let [start, end] = [Infinity, -Infinity];
  for (const each of slices) {
    start = Math.min(start, each[0]);
    end = Math.max(end, each[0] + each[1]);
  }
  return [start, end];
}

function given(value: Parameters[string]): value is string | number {
  return value !== undefined && value !== "";
}

function keeps(row: { uid: string; global_step: number; validation: boolean }, wanted: Parameters): boolean {
  if (given(wanted.uid) && !row.uid.startsWith(String(wanted.uid))) return false;
  if (given(wanted.step) && row.global_step !== Number(wanted.step)) return false;
  return !given(wanted.validation) || row.validation === (wanted.validation === "true");
}

function keepsEpisode(row: EpisodeRow, wanted: Parameters): boolean {
  if (given(wanted.status) && row.status !== wanted.status) return false;
  if (given(wanted.min_reward) && !(row.reward !== null && row.reward >= Number(wanted.min_reward))) return false;
  if (given(wanted.max_reward) && !(row.reward !== null && row.reward <= Number(wanted.max_reward))) return false;
  if (given(wanted.tools)) {
    const count = wanted.tools === "errors" ? row.num_tool_errors : row.num_tool_calls;
    if (count > 0 === (wanted.tools === "unused")) return false;
  }
  return keeps(row, wanted);
}

async function listEpisodes(run: string, rows: EpisodeRow[], wanted: Parameters): Promise<EpisodePage> {
  let found = rows.map((row, number) => ({ row, number })).filter(({ row }) => keepsEpisode(row, wanted));
  if (given(wanted.q)) {
    const text = String(wanted.q).toLowerCase();
    const hits = [];
    for (const each of found) if (await hasText(`episode/${run}/${each.number}`, text)) hits.push(each);
    found = hits;
  }
  const sort = String(wanted.sort ?? "row");
  const turn = wanted.order === "desc" ? -1 : 1;
  const value = ({ row, number }: (typeof found)[0]) => (sort === "row" ? number : row[sort as keyof EpisodeRow]);
  found.sort((a, b) => {
    const [left, right] = [value(a), value(b)];
    if (left === right) return 0;
    if (left === null || left === undefined) return 1;
    if (right === null || right === undefined) return -1;
    return left < right ? -turn : turn;
  });
  return { total: found.length, at_most: found.length, searched: 1, settled: true, episodes: slice(found, wanted).map(({ row }) => row) };
}

async function hasText(name: string, text: string): Promise<boolean> {
  const episode = await read<Episode>(name);
  const values: unknown[] = [episode.messages, episode.records.map((each) => [each.prompt_text, each.response_text])];
  while (values.length > 0) {
    const value = values.pop();
    if (typeof value === "string" && value.toLowerCase().includes(text)) return true;
    if (value && typeof value === "object") values.push(...Object.values(value));
  }
  return false;
}

async function listGroups(run: string, wanted: Parameters): Promise<{ total: number; groups: Group[] }> {
  const { groups } = await read<{ groups: Group[] }>(`groups/${run}`);
  const found = groups.filter((each) => keeps(each, wanted));
  const rank = (each: Group) => (each.mean === null ? Infinity : wanted.sort === "mean" ? each.mean : each.min! - each.max!);
  if (wanted.sort === "mean" || wanted.sort === "spread") found.sort((a, b) => rank(a) - rank(b) || 0);
  return { total: found.length, groups: slice(found, wanted) };
}

function slice<T>(found: T[], wanted: Parameters): T[] {
  const offset = Number(wanted.offset ?? 0);
  return found.slice(offset, offset + Number(wanted.limit ?? 100));
}
