// The episodes that run now, as the observer of the run tells them; they come into the list when they end.
import { useEffect, useState } from "preact/hooks";
import type { Run, RunningPage } from "./api";
import { useLoaded } from "./parts";
import { literal, number, seconds } from "./text";

const SHOWN = 20;

export function Running({ place, run }: { place: number; run: Run }) {
  const { value } = useLoaded<RunningPage>(`runs/${place}/running`, { revision: run.running_revision });
  const elapsed = useElapsed(value);
  if (!value?.episodes.length) return null;
  const shown = value.episodes.slice(0, SHOWN);
  return (
    <details class="running" open>
      <summary>
        <h2>{number(value.total)} running</h2>
        {shown.length < value.total && <span class="dim"> the {shown.length} that run longest</span>}
      </summary>
      <div class="scroll">
        <table class="running">
          <thead>
            <tr>
              <th scope="col">episode</th>
              <th scope="col">worker</th>
              <th scope="col" class="number">turns</th>
              <th scope="col" class="number">sampled</th>
              <th scope="col">last event</th>
              <th scope="col" class="number">so far</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((each) => (
              <tr key={each.key}>
                <th scope="row">
                  {literal(each.key)} <span class="dim">{literal(each.agent_name)}</span>
                </th>
                <td>{literal(each.worker)}</td>
                <td class="number">{each.num_turns}</td>
                <td class="number">{number(each.num_tokens)}</td>
                <td>
                  {literal(each.last)}, {whole(each.last_s + elapsed)} ago
                </td>
                <td class="number">{whole(each.seconds + elapsed)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}

function whole(value: number): string {
  return value < 10 ? seconds(value) : `${Math.floor(value)} s`;
}

/** Seconds since an answer arrived, counted in the page between answers. */
function useElapsed(answer: unknown): number {
  const [elapsed, setElapsed] = useState(0);
  useEffect(() => {
    const start = performance.now();
    setElapsed(0);
    const timer = setInterval(() => setElapsed((performance.now() - start) / 1000), 1000);
    return () => clearInterval(timer);
  }, [answer]);
  return elapsed;
}
