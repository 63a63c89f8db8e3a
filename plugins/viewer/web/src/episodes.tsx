import { useEffect, useRef, useState } from "preact/hooks";
import type { EpisodePage, Run } from "./api";
import { Field, Problem, Status, useKeys, useLoaded } from "./parts";
import { link, type Place, replaceQuery } from "./router";
import { Running } from "./running";
import { literal, number, seconds } from "./text";

const PAGE = 100;
const COLUMNS: [sort: string, title: string][] = [
  ["row", "episode"],
  ["status", "status"],
  ["reward", "reward"],
  ["num_turns", "turns"],
  ["num_tool_calls", "tools"],
  ["action_tokens", "sampled"],
  ["response_tokens", "response"],
  ["total_s", "time"],
];
const STATUSES = ["completed", "truncated", "timed_out", "aborted", "failed"];

function countText({ total, at_most, searched, settled }: EpisodePage): string {
  const exact = `${number(total)} ${total === 1 ? "episode" : "episodes"}`;
  if (searched >= 1) return exact;
  const counted = `${number(total)}+ episodes, at most ${number(at_most)}, ${Math.floor(100 * searched)} % searched`;
  return settled ? counted : `${counted}; the first ones are not known yet`;
}

export function Episodes({ place, run }: { place: Place; run: Run }) {
  const { query } = place;
  const { revision } = run;
  const offset = Number(query.get("offset") ?? 0);
  const sort = query.get("sort") ?? "row";
  const order = query.get("order") ?? "asc";
  const [attempt, setAttempt] = useState(0);
  const conditions = Object.fromEntries(["q", "status", "tools", "min_reward", "max_reward", "step", "validation", "uid"].map((name) => [name, query.get(name) ?? ""]));
  const { value, error } = useLoaded<EpisodePage>(`runs/${place.run}/episodes`, { ...conditions, sort, order, offset, limit: PAGE, again: attempt || undefined, revision });
  // A choice belongs to one address: another filter, order or page begins at its first row.
  const [choice, setChoice] = useState({ hash: "", row: 0 });
  const chosen = choice.hash === location.hash ? choice.row : 0;
  const table = useRef<HTMLTableSectionElement>(null);

  // A search continues on the server; ask again until it has seen every episode. When the page has its hits, only their
  // number is missing, and each question interrupts the count.
  useEffect(() => {
    if (!value || value.searched >= 1) return;
    const timer = setTimeout(() => setAttempt((count) => count + 1), value.settled ? 500 : 150);
    return () => clearTimeout(timer);
  }, [value]);
  useKeys((event) => {
    if (!value) return;
    if (event.key === "j" || event.key === "k") {
      const next = Math.min(value.episodes.length - 1, Math.max(0, chosen + (event.key === "j" ? 1 : -1)));
      setChoice({ hash: location.hash, row: next });
      const row = table.current?.rows[next];
      row?.scrollIntoView({ block: "nearest" });
      row?.querySelector("a")?.focus({ preventScroll: true });
    } else if (event.key === "n" && value.total > offset + PAGE) replaceQuery({ offset: offset + PAGE });
    else if (event.key === "p" && offset > 0) replaceQuery({ offset: Math.max(0, offset - PAGE) || undefined });
  });

  const set = (name: string) => (text: string) => replaceQuery({ [name]: text, offset: undefined });
  const sortBy = (name: string) =>
    replaceQuery({ sort: name, order: sort === name && order === "desc" ? "asc" : sort === name || name === "row" ? "desc" : "desc", offset: undefined });
  const longest = Math.max(1, ...(value?.episodes.map((each) => each.response_tokens) ?? []));
  return (
    <section aria-labelledby="heading">
      <h1 id="heading">Episodes</h1>
      {run.num_running > 0 && <Running key={place.run} place={place.run} run={run} />}
      <form class="filters" role="search" onSubmit={(event) => event.preventDefault()}>
        <label class="grow">
          Search
          <Field id="search" type="search" placeholder="text in messages and tokens   /" value={conditions.q} onValue={set("q")} />
        </label>
        <label>
          Status
          <select value={conditions.status} onChange={(event) => set("status")(event.currentTarget.value)}>
            <option value="">all</option>
            {STATUSES.map((each) => (
              <option value={each}>{each.replace("_", " ")}</option>
            ))}
          </select>
        </label>
        <label>
          Tools
          <select value={conditions.tools} onChange={(event) => set("tools")(event.currentTarget.value)}>
            <option value="">all</option>
            <option value="used">used</option>
            <option value="unused">not used</option>
            <option value="errors">with errors</option>
          </select>
        </label>
        <label>
          Reward from
          <Field type="number" step="any" class="short" value={conditions.min_reward} onValue={set("min_reward")} />
        </label>
        <label>
          to
          <Field type="number" step="any" class="short" value={conditions.max_reward} onValue={set("max_reward")} />
        </label>
        {run.has_metrics && (
          <label>
            Kind
            <select value={conditions.validation} onChange={(event) => set("validation")(event.currentTarget.value)}>
              <option value="">all</option>
              <option value="false">training</option>
              <option value="true">held out</option>
            </select>
          </label>
        )}
        <label>
          Step
          <Field type="number" min="0" class="short" value={conditions.step} onValue={set("step")} />
        </label>
      </form>
      <Problem text={error} />
      {value && (
        <p class="count" role="status">
          {countText(value)}
        </p>
      )}
      <div class="scroll">
        <table class="episodes">
          <thead>
            <tr>
              {COLUMNS.map(([name, title], index) => (
                <th scope="col" class={index > 1 ? "number" : ""} aria-sort={sort === name ? (order === "asc" ? "ascending" : "descending") : "none"}>
                  <button onClick={() => sortBy(name)}>
                    {title}
                    <span aria-hidden="true">{sort === name ? (order === "asc" ? " ↑" : " ↓") : ""}</span>
                  </button>
                </th>
              ))}
            </tr>
          </thead>
          <tbody ref={table}>
            {value?.episodes.map((each, index) => (
              <tr class={index === chosen ? "chosen" : ""} onClick={() => (location.hash = link(place.run, "episode", { key: each.key }))}>
                <th scope="row">
                  <a href={link(place.run, "episode", { key: each.key })}>{literal(each.key)}</a>
                  <span class="dim">
                    {each.validation && "held out · "}
                    {literal(each.data_source)}
                    {each.num_records > 1 && ` · ${each.num_records} records`}
                  </span>
                </th>
                <td>
                  <Status status={each.status} />
                  {each.fault_owner && <span class="dim">{literal(each.fault_owner)}</span>}
                </td>
                <td class="number strong">{number(each.reward)}</td>
                <td class="number">{each.num_turns}</td>
                <td class="number">
                  {each.num_tool_calls}
                  {each.num_tool_errors > 0 && <span class="bad"> ({each.num_tool_errors} ✗)</span>}
                </td>
                <td class="number">{number(each.action_tokens)}</td>
                <td class="number">
                  <meter aria-hidden="true" min={0} max={longest} value={each.response_tokens} /> {number(each.response_tokens)}
                </td>
                <td class="number">{seconds(each.total_s)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {value && value.total > PAGE && (
        <nav class="pages" aria-label="Pages">
          <button disabled={offset === 0} onClick={() => replaceQuery({ offset: Math.max(0, offset - PAGE) || undefined })}>
            ← previous
          </button>
          <span>
            {offset + 1}–{Math.min(offset + PAGE, value.total)} of {value.total.toLocaleString("en")}
          </span>
          <button disabled={offset + PAGE >= value.total} onClick={() => replaceQuery({ offset: offset + PAGE })}>
            next →
          </button>
        </nav>
      )}
    </section>
  );
}
