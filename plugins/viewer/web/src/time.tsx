import { useState } from "preact/hooks";
import type { Episode, EpisodePage, EpisodeRow, Run, Slice, Timeline } from "./api";
import { Field, Problem, useLoaded } from "./parts";
import { link, type Place, replaceQuery } from "./router";
import { literal, number, seconds } from "./text";

const KINDS: [kind: string, title: string][] = [
  ["generate", "generating"],
  ["tool", "tool"],
  ["reward", "reward"],
  ["memory", "weights and memory"],
  ["episode", "episode, waiting where nothing is above it"],
];
const ROW = 16;
/** Top and height of each kind in a row: a shape for each, so that no colour is needed to tell them apart. */
const SHAPES: Record<string, [top: number, height: number]> = { episode: [2, 12], generate: [4, 8], turn: [4, 8], tool: [9, 6], reward: [1, 6], memory: [7, 2] };

export function Time({ place, run }: { place: Place; run: Run }) {
  const asked = place.query.get("step") ?? "";
  const step = asked === "" && run.has_metrics ? "last" : asked === "all" ? "" : asked;
  const { value, error } = useLoaded<{ timeline: Timeline | null }>(`runs/${place.run}/timeline`, { revision: run.revision, step });
  return (
    <section aria-labelledby="heading">
      <h1 id="heading">Time</h1>
      {run.has_metrics && run.has_trace && (
        <form class="filters" onSubmit={(event) => event.preventDefault()}>
          <label>
            Step
            <Field type="number" min="0" class="short" placeholder={asked === "all" ? "all" : "newest"} value={asked === "all" ? "" : asked} onValue={(text) => replaceQuery({ step: text })} />
          </label>
          <button aria-pressed={asked === "all"} onClick={() => replaceQuery({ step: asked === "all" ? undefined : "all" })}>
            all steps
          </button>
        </form>
      )}
      <Problem text={error} />
      {value?.timeline && <Rows timeline={value.timeline} run={place.run} />}
      {value && !value.timeline && (
        <>
          <p class="empty">
            This run has no trace, so the page knows durations and no starts. For a timeline, run <code>turnwise rollout CONFIG --out DIR --trace DIR/trace.json</code>, or give a training the observer <code>trace_file</code>.
          </p>
          <Slowest run={place.run} />
        </>
      )}
    </section>
  );
}

/** The time of one episode: its slices if the run has a trace, else the shares of its time. */
export function EpisodeTime({ episode, run, revision }: { episode: Episode; run: number; revision: string }) {
  const { value, error } = useLoaded<{ timeline: Timeline | null }>(`runs/${run}/timeline`, { key: episode.key, revision });
  return (
    <>
      <Problem text={error} />
      {value && (value.timeline?.rows.length ? <Rows timeline={value.timeline} run={run} of={episode.key} /> : <Shares episodes={[{ ...episode.metrics, key: episode.key } as unknown as EpisodeRow]} run={run} />)}
    </>
  );
}

function Legend({ kinds }: { kinds: [string, string][] }) {
  return (
    <p class="legend">
      {kinds.map(([kind, title]) => (
        <span>
          <svg class="swatch" viewBox={`0 0 24 ${ROW}`} aria-hidden="true">
            <rect class={`slice ${kind}`} x={0} width={24} y={SHAPES[kind][0]} height={SHAPES[kind][1]} />
          </svg>{" "}
          {title}
        </span>
      ))}
    </p>
  );
}

function Rows({ timeline, run, of }: { timeline: Timeline; run: number; of?: string }) {
  const [chosen, setChosen] = useState<Slice | null>(null);
  const width = 1000;
  const x = (at: number) => (at / (timeline.seconds || 1)) * width;
  const slowest = of === undefined ? timeline.longest : null;
  const isSlowest = (slice: Slice) => slowest !== null && slice[2] === "episode" && slice[0] === slowest[0] && slice[1] === slowest[1] && slice[4] === slowest[4];
  const numBlocks = timeline.rows.reduce((sum, row) => sum + row.slices.filter((each) => each[5] !== undefined).length, 0);
  const name = (slice: Slice) => (slice[4] ? <a href={link(run, "episode", { key: slice[4] })}>{literal(slice[4])}</a> : literal(slice[3]));
  return (
    <>
      <Legend kinds={KINDS} />
      {slowest && (
        <p>
          Longest episode: {name(slowest)}, {seconds(slowest[1])}, {((100 * slowest[1]) / timeline.seconds).toFixed(0)} % of the {seconds(timeline.seconds)} shown.
        </p>
      )}
      {(timeline.num_merged > 0 || timeline.num_hidden_rows > 0) && (
        <p class="bounds">
          {timeline.num_merged > 0 && `${number(timeline.num_merged)} short slices are drawn as ${number(numBlocks)} blocks of neighbours. `}
          {timeline.num_hidden_rows > 0 && `${number(timeline.num_hidden_rows)} rows, whose slices are shorter, are not drawn. `}
          {of === undefined && "A step or an episode alone shows more."}
        </p>
      )}
      <p class="readout" role="status">
        {chosen
          ? `${literal(chosen[3])}: ${seconds(chosen[1])}, from ${seconds(chosen[0])}${chosen[4] ? `, episode ${literal(chosen[4])}` : ""}`
          : `Point at a slice to read it${of === undefined ? "; click it to open its episode" : ""}.`}
      </p>
      <div class="timeline">
        {timeline.rows.map((row, index) => (
          <div class="lane">
            <span class="lanename">{row.name !== timeline.rows[index - 1]?.name && literal(row.name)}</span>
            <svg viewBox={`0 0 ${width} ${ROW}`} preserveAspectRatio="none" role="img" aria-label={`${row.name}, slot ${row.slot}: ${row.slices.reduce((sum, each) => sum + (each[5] ?? 1), 0)} slices`}>
              {row.slices.map((slice) => (
                <rect
                  class={`slice ${slice[2]}${isSlowest(slice) ? " slowest" : ""}`}
                  x={x(slice[0])}
                  width={Math.max(0.6, x(slice[1]))}
                  y={SHAPES[slice[2]][0]}
                  height={SHAPES[slice[2]][1]}
                  onMouseEnter={() => setChosen(slice)}
                  onClick={() => slice[4] && slice[4] !== of && (location.hash = link(run, "episode", { key: slice[4] }))}
                />
              ))}
            </svg>
          </div>
        ))}
        <div class="lane">
          <span />
          <span class="ends">
            <span>0 s</span>
            <span>{seconds(timeline.seconds)}</span>
          </span>
        </div>
      </div>
    </>
  );
}

function Slowest({ run }: { run: number }) {
  const { value } = useLoaded<EpisodePage>(`runs/${run}/episodes`, { sort: "total_s", order: "desc", limit: 50 });
  if (!value?.episodes.length) return null;
  return (
    <>
      <h2>Slowest episodes</h2>
      <Shares episodes={value.episodes} run={run} />
    </>
  );
}

/** The times of episodes by kind, without their places in time. */
function Shares({ episodes, run }: { episodes: EpisodeRow[]; run: number }) {
  const longest = Math.max(...episodes.map((each) => each.total_s)) || 1;
  const bar = (kind: string, from: number, width: number) => <rect class={`slice ${kind}`} x={from} width={width} y={SHAPES[kind][0]} height={SHAPES[kind][1]} />;
  return (
    <>
      <Legend kinds={[["generate", "model"], ["tool", "tools"], ["reward", "reward"], ["episode", "waiting"]]} />
      <div class="timeline">
        {episodes.map((each) => {
          // Parallel paths add up, so the parts can be longer than the whole.
          const parts = each.llm_s + each.tool_s + each.reward_s;
          const scale = (1000 * Math.min(1, each.total_s / (parts || 1))) / longest;
          const tool = each.llm_s * scale;
          const reward = tool + each.tool_s * scale;
          return (
            <div class="lane">
              <a class="lanename" href={link(run, "episode", { key: each.key })}>
                {literal(each.key)}
              </a>
              <svg viewBox={`0 0 1000 ${ROW}`} preserveAspectRatio="none" role="img" aria-label={`${seconds(each.total_s)}: model ${seconds(each.llm_s)}, tools ${seconds(each.tool_s)}, reward ${seconds(each.reward_s)}`}>
                {bar("episode", 0, (1000 * each.total_s) / longest)}
                {bar("generate", 0, tool)}
                {bar("tool", tool, each.tool_s * scale)}
                {bar("reward", reward, each.reward_s * scale)}
              </svg>
            </div>
          );
        })}
      </div>
    </>
  );
}
