import { useState } from "preact/hooks";
import type { EpisodePage, Slice, Timeline } from "./api";
import { Problem, useLoaded } from "./parts";
import { link, type Place } from "./router";
import { literal, seconds } from "./text";

const KINDS: [string, string][] = [
  ["generate", "generating"],
  ["tool", "tool"],
  ["reward", "reward"],
  ["memory", "weights and memory"],
  ["episode", "episode, waiting where nothing is above it"],
];

export function Time({ place, revision }: { place: Place; revision: string }) {
  const { value, error } = useLoaded<{ timeline: Timeline | null }>(`runs/${place.run}/timeline`, { revision });
  return (
    <section aria-labelledby="heading">
      <h1 id="heading">Time</h1>
      <Problem text={error} />
      {value?.timeline && <Rows timeline={value.timeline} run={place.run} />}
      {value && !value.timeline && (
        <>
          <p class="empty">
            This run has no trace, so the page knows durations and no starts. For a timeline, run{" "}
            <code>turnwise rollout CONFIG --out DIR --trace DIR/trace.json</code>.
          </p>
          <Slowest run={place.run} />
        </>
      )}
    </section>
  );
}

const ROW = 16;

function Rows({ timeline, run }: { timeline: Timeline; run: number }) {
  const [chosen, setChosen] = useState<Slice | null>(null);
  const width = 1000;
  const x = (at: number) => (at / (timeline.seconds || 1)) * width;
  const slowest = timeline.rows.flatMap((row) => row.slices).filter((each) => each[2] === "episode").sort((a, b) => b[1] - a[1])[0];
  return (
    <>
      <p class="legend">
        {KINDS.map(([kind, title]) => (
          <span>
            <i class={`swatch ${kind}`} aria-hidden="true" /> {title}
          </span>
        ))}
      </p>
      {slowest && (
        <p>
          Longest episode: <a href={link(run, "episode", { key: slowest[4] ?? "" })}>{literal(slowest[4] ?? "")}</a>, {seconds(slowest[1])}, {((100 * slowest[1]) / timeline.seconds).toFixed(0)} % of the {seconds(timeline.seconds)} of the run.
        </p>
      )}
      <p class="readout" role="status">
        {chosen ? `${literal(chosen[3])}: ${seconds(chosen[1])}, from ${seconds(chosen[0])}${chosen[4] ? `, episode ${literal(chosen[4])}` : ""}` : "Point at a slice to read it; click it to open its episode."}
      </p>
      <div class="timeline">
        {timeline.rows.map((row, index) => (
          <div class="lane">
            <span class="lanename">{row.name !== timeline.rows[index - 1]?.name && literal(row.name)}</span>
            <svg viewBox={`0 0 ${width} ${ROW}`} preserveAspectRatio="none" role="img" aria-label={`${row.name}, slot ${row.slot}: ${row.slices.length} slices`}>
              {row.slices.map((slice) => (
                <rect
                  class={`slice ${slice[2]}${slice === slowest ? " slowest" : ""}`}
                  x={x(slice[0])}
                  width={Math.max(0.6, x(slice[1]))}
                  y={slice[2] === "episode" ? 2 : 4}
                  height={slice[2] === "episode" ? ROW - 4 : ROW - 8}
                  onMouseEnter={() => setChosen(slice)}
                  onClick={() => slice[4] && (location.hash = link(run, "episode", { key: slice[4] }))}
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
  const longest = value?.episodes[0]?.total_s || 1;
  if (!value?.episodes.length) return null;
  return (
    <>
      <h2>Slowest episodes</h2>
      <p class="legend">
        <span>
          <i class="swatch generate" aria-hidden="true" /> model
        </span>
        <span>
          <i class="swatch tool" aria-hidden="true" /> tools
        </span>
        <span>
          <i class="swatch reward" aria-hidden="true" /> reward
        </span>
        <span>
          <i class="swatch episode" aria-hidden="true" /> waiting
        </span>
      </p>
      <div class="timeline">
        {value.episodes.map((each) => {
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
              <svg viewBox={`0 0 1000 ${ROW}`} preserveAspectRatio="none" role="img" aria-label={`${seconds(each.total_s)}: model ${seconds(each.llm_s)}, tools ${seconds(each.tool_s)}`}>
                <rect class="slice episode" x={0} width={(1000 * each.total_s) / longest} y={2} height={ROW - 4} />
                <rect class="slice generate" x={0} width={tool} y={4} height={ROW - 8} />
                <rect class="slice tool" x={tool} width={each.tool_s * scale} y={4} height={ROW - 8} />
                <rect class="slice reward" x={reward} width={each.reward_s * scale} y={4} height={ROW - 8} />
              </svg>
            </div>
          );
        })}
      </div>
    </>
  );
}
