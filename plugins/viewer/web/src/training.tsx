import { useMemo, useState } from "preact/hooks";
import type { Metrics, Run, Series } from "./api";
import { Problem, useLoaded } from "./parts";
import { link, type Place, replaceQuery } from "./router";
import { scaleOf } from "./scale";
import { literal, number } from "./text";

type AllSeries = Record<string, Series>;

const CHARTS: [title: string, names: string[]][] = [
  ["reward", ["reward/mean", "validation/reward/mean"]],
  ["response tokens", ["length/mean", "length/max"]],
  ["entropy (nats)", ["actor/entropy"]],
  ["KL of the update", ["policy/kl", "actor/approx_kl", "actor/kl"]],
  ["gap to the rollout's log-probabilities", ["gap/mean", "gap/max"]],
  ["share of clipped tokens", ["actor/clip_frac"]],
  ["tool calls per episode", ["tools/per_episode", "tools/errors"]],
  ["norm of the gradient", ["actor/grad_norm"]],
  ["seconds per stage", ["seconds/step", "seconds/rollout", "seconds/update", "seconds/sync"]],
];

export function Training({ place, runs }: { place: Place; runs: Run[] }) {
  const other = place.query.get("with");
  const second = other !== null && runs[Number(other)] ? Number(other) : null;
  const first_ = useLoaded<Metrics>(`runs/${place.run}/metrics`, { revision: runs[place.run].revision });
  const second_ = useLoaded<Metrics>(second === null ? null : `runs/${second}/metrics`, { revision: second === null ? "" : runs[second].revision });
  const [more, setMore] = useState("");
  const series = first_.value?.series;
  const lines: Line[] = [];
  if (series) lines.push({ run: place.run, name: runs[place.run].name, series });
  if (second !== null && second_.value?.series) lines.push({ run: second, name: runs[second].name, series: second_.value.series });
  const names = useMemo(() => Object.keys(series ?? {}).sort(), [series]);
  return (
    <section aria-labelledby="heading">
      <h1 id="heading">Training</h1>
      {[first_, second_].map(({ value, error }) => (
        <Problem text={error || (value?.problem ?? "")} />
      ))}
      {first_.value && !series && <p class="empty">This run has no metrics of a training: only `turnwise train` writes metrics.jsonl.</p>}
      {series && (
        <>
          <form class="filters" onSubmit={(event) => event.preventDefault()}>
            <label>
              Compare with
              <select value={other ?? ""} onChange={(event) => replaceQuery({ with: event.currentTarget.value })}>
                <option value="">no other run</option>
                {runs.map((run, index) => index !== place.run && run.has_metrics && <option value={index}>{literal(run.name)}</option>)}
              </select>
            </label>
            <label class="grow">
              Further metric
              <select value={more} onChange={(event) => setMore(event.currentTarget.value)}>
                <option value="">choose one of {names.length}</option>
                {names.map((name) => (
                  <option value={name}>{literal(name)}</option>
                ))}
              </select>
            </label>
          </form>
          <div class="charts">
            {more && <Chart title={more} names={[more]} lines={lines} />}
            {CHARTS.map(([title, wanted]) => {
              const found = wanted.filter((name) => lines.some((line) => line.series[name]));
              return found.length > 0 && <Chart title={title} names={found} lines={lines} />;
            })}
          </div>
          <HeldOut lines={lines} />
        </>
      )}
    </section>
  );
}

interface Line {
  run: number;
  name: string;
  series: AllSeries;
}

const WIDTH = 460;
const HEIGHT = 220;
const LEFT = 64;
/** Width of the widest character of a label. */
const LETTER = 9;
const BOTTOM = 26;
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

function Chart({ title, names, lines }: { title: string; names: string[]; lines: Line[] }) {
  const [step, setStep] = useState<number | null>(null);
  const curves = lines.flatMap((line, run) =>
    names.map((name, index) => ({ line, run, name, index, points: pointsOf(line.series[name]) })).filter((each) => each.points.length > 0),
  );
  const band = lines.map((line) => intervalOf(line.series, names));
  const all = curves.flatMap((each) => each.points);
  const steps = [...new Set(all.map(([at]) => at))].sort((a, b) => a - b);
  const values = [...all.map(([, value]) => value), ...band.flat().flatMap(([, low, high]) => [low, high])];
  const scale = scaleOf(values);
  const labels = scale.ticks.map((value) => number(value, 2));
  // As wide as the widest label, which must not be cut.
  const left = Math.max(LEFT, 14 + LETTER * Math.max(...labels.map((each) => each.length)));
  const span = steps[steps.length - 1] - steps[0] || 1;
  const x = (at: number) => left + ((at - steps[0]) / span) * (WIDTH - left - 12);
  const y = (value: number) => 8 + (1 - scale.place(value)) * (HEIGHT - BOTTOM - 8);
  const nearest = (event: MouseEvent) => {
    const box = (event.currentTarget as SVGElement).getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    setStep(steps.reduce((best, each) => (Math.abs(x(each) - at) < Math.abs(x(best) - at) ? each : best), steps[0]));
  };
  return (
    <figure class="chart">
      <figcaption>{literal(title)}</figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`${title} over ${steps.length} steps, from ${number(values[0])} to ${number(values[values.length - 1])}`} onMouseMove={nearest} onMouseLeave={() => setStep(null)}>
        {scale.ticks.map((value, index) => (
          <g class="grid">
            <line x1={left} x2={WIDTH - 12} y1={y(value)} y2={y(value)} />
            <text x={left - 6} y={y(value) + 4} text-anchor="end">
              {labels[index]}
            </text>
          </g>
        ))}
        {[steps[0], steps[steps.length - 1]].map((at, index) => (
          <text class="axis" x={x(at)} y={HEIGHT - 6} text-anchor={index ? "end" : "start"}>
            {index ? "step " : ""}
            {at}
          </text>
        ))}
        {band.map((points, run) =>
          points.map(([at, from, to]) => <path class={`interval c${run * 2 + 1}`} d={`M${x(at) - 4} ${y(from)}h8m-4 0V${y(to)}m-4 0h8`} />),
        )}
        {curves.map((each) => (
          <path class={`line c${each.run * 2 + (each.index % 2)}`} stroke-dasharray={DASHES[each.index % DASHES.length]} d={each.points.map(([at, value], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("")} />
        ))}
        {curves.map((each) => each.points.length < 40 && each.points.map(([at, value]) => <circle class={`dot c${each.run * 2 + (each.index % 2)}`} cx={x(at)} cy={y(value)} r={2.4} />))}
        {step !== null && <line class="cursor" x1={x(step)} x2={x(step)} y1={8} y2={HEIGHT - BOTTOM} />}
      </svg>
      <ul class="keys">
        {curves.map((each) => {
          const at = step ?? each.points[each.points.length - 1][0];
          const value = each.points.find(([found]) => found === at)?.[1];
          return (
            <li>
              <svg viewBox="0 0 26 8" aria-hidden="true">
                <path class={`line c${each.run * 2 + (each.index % 2)}`} stroke-dasharray={DASHES[each.index % DASHES.length]} d="M1 4h24" />
              </svg>
              {literal(each.name)}
              {lines.length > 1 && ` (${literal(each.line.name)})`}: <b>{number(value)}</b>
            </li>
          );
        })}
        {step !== null && <li class="dim">step {step}</li>}
      </ul>
      <StepLinks steps={steps} lines={lines} title={title} />
    </figure>
  );
}

/** Links from steps to the episodes that they learned from, for people and for keyboards. */
function StepLinks({ steps, lines, title }: { steps: number[]; lines: Line[]; title: string }) {
  if (title !== "reward") return null;
  return (
    <p class="steps">
      episodes of step{" "}
      {steps.filter((each) => each > 0).slice(-40).map((each) => (
        <a href={link(lines[0].run, "episodes", { step: each, validation: "false" })}>{each}</a>
      ))}
    </p>
  );
}

function pointsOf(series: Series | undefined): [number, number][] {
  if (!series) return [];
  return series.steps.flatMap((step, index): [number, number][] => (series.values[index] === null ? [] : [[step, series.values[index]!]]));
}

function intervalOf(series: AllSeries, names: string[]): [number, number, number][] {
  if (!names.includes("validation/reward/mean")) return [];
  const low = pointsOf(series["validation/reward/low"]);
  const high = new Map(pointsOf(series["validation/reward/high"]));
  return low.flatMap(([step, value]): [number, number, number][] => (high.has(step) ? [[step, value, high.get(step)!]] : []));
}

const ROWS: [string, string][] = [
  ["reward/mean", "reward"],
  ["length/mean", "response tokens"],
  ["turns/mean", "turns"],
  ["tools/per_episode", "tool calls"],
  ["tools/errors", "tool errors"],
  ["status/truncated", "truncated"],
];

function HeldOut({ lines }: { lines: Line[] }) {
  const found = lines.filter((line) => line.series["validation/reward/mean"]);
  if (found.length === 0) return null;
  const cell = (line: Line, name: string, last: boolean): string => {
    const points = pointsOf(line.series[`validation/${name}`]);
    if (points.length === 0) return "–";
    const [step, value] = last ? points[points.length - 1] : points[0];
    const interval = intervalOf(line.series, ["validation/reward/mean"]).find(([at]) => at === step);
    return number(value) + (name === "reward/mean" && interval ? ` [${number(interval[1])}, ${number(interval[2])}]` : "");
  };
  const stepOf = (line: Line, last: boolean): number => {
    const { steps } = line.series["validation/reward/mean"];
    return steps[last ? steps.length - 1 : 0];
  };
  return (
    <table class="heldout">
      <caption>Held-out tasks, with 95 % bootstrap intervals over tasks</caption>
      <thead>
        <tr>
          <th scope="col">metric</th>
          {found.map((line) => (
            <>
              {["first", "last"].map((name) => (
                <th scope="col" class="number">
                  <a href={link(line.run, "episodes", { step: stepOf(line, name === "last"), validation: "true" })} title="the held-out episodes">
                    {name}
                    {found.length > 1 && ` (${literal(line.name)})`}
                  </a>
                </th>
              ))}
            </>
          ))}
        </tr>
      </thead>
      <tbody>
        {ROWS.map(([name, title]) => (
          <tr>
            <th scope="row">{title}</th>
            {found.map((line) => (
              <>
                <td class="number">{cell(line, name, false)}</td>
                <td class="number">{cell(line, name, true)}</td>
              </>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}
