import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Episode } from "./episode";
import { Episodes } from "./episodes";
import { isExported } from "./exported";
import { Groups } from "./groups";
import { useRuns } from "./live";
import { Problem, useKeys } from "./parts";
import { link, usePlace } from "./router";
import { literal, number } from "./text";
import { Time } from "./time";
import { Training } from "./training";

const KEYS: [string, string][] = [
  ["j, k", "next, previous episode"],
  ["Enter", "open the chosen episode"],
  ["n, p", "next, previous page"],
  ["/", "search"],
  ["g e, g g, g t, g c", "episodes, groups, training, clock"],
  ["← → ↑ ↓", "move through tokens"],
  ["f", "fold, unfold tool calls and results"],
  ["Esc", "back to the list"],
  ["?", "this help"],
];
const VIEWS: Record<string, [string, string]> = { e: ["episodes", "Episodes"], g: ["groups", "Groups"], t: ["training", "Training"], c: ["time", "Time"] };
const ICON = document.querySelector<HTMLLinkElement>("link[rel=icon]")!.href;
const THEMES = ["system", "light", "dark"];

function App() {
  const place = usePlace();
  const { runs, error, connected } = useRuns();
  const [theme, setTheme] = useState(sessionStorage.getItem("theme") ?? "system");
  const help = useRef<HTMLDialogElement>(null);
  const pending = useRef("");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    sessionStorage.setItem("theme", theme);
  }, [theme]);
  useKeys((event) => {
    const before = pending.current;
    pending.current = "";
    if (before === "g" && event.key in VIEWS) location.hash = link(place.run, VIEWS[event.key][0]);
    else if (event.key === "g") pending.current = "g";
    else if (event.key === "?") help.current?.showModal();
    else if (event.key === "Escape" && place.view === "episode") history.back();
    else if (event.key === "/") {
      event.preventDefault();
      document.getElementById("search")?.focus();
    }
  });
  useEffect(() => {
    document.title = `${literal(place.query.get("key") ?? "") || (Object.values(VIEWS).find(([view]) => view === place.view)?.[1] ?? "turnwise")} · turnwise`;
  });
  if (!runs) return <Problem text={error} />;
  const run = runs[place.run];
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the content
      </a>
      <header class="top">
        <a class="brand" href={link(0, "episodes")}>
          <img src={ICON} alt="" width="22" height="22" /> turnwise
        </a>
        <label class="runs">
          <span class="hidden">Run</span>
          <select value={place.run} onChange={(event) => (location.hash = link(Number(event.currentTarget.value), place.view === "episode" ? "episodes" : place.view))}>
            {runs.map((each, index) => (
              <option value={index}>
                {literal(each.name)} · {number(each.num_episodes)} episodes{each.is_partial ? " · not finished" : ""}
              </option>
            ))}
          </select>
        </label>
        <nav class="views" aria-label="Views">
          {Object.values(VIEWS).map(([view, title]) => (
            <a href={link(place.run, view)} aria-current={place.view === view || (place.view === "episode" && view === "episodes") ? "page" : undefined}>
              {title}
            </a>
          ))}
        </nav>
        <span class="grow" />
        {isExported && run && (
          <span class="exported" title="a copy without a server, made by turnwise view --export">
            exported: {number(run.num_episodes)} of {number(run.num_all)} episodes
          </span>
        )}
        {!isExported && (
          <span class={connected ? "connection" : "connection lost"} role="status" title={connected ? "the page shows changes of the run within a second or two" : "the page shows the last state, and tries to reach the server"}>
            <span aria-hidden="true">{connected ? "●" : "○"}</span> {connected ? "live" : "reconnecting"}
          </span>
        )}
        <button onClick={() => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])}>theme: {theme}</button>
        <button onClick={() => help.current?.showModal()} aria-label="Keyboard help">
          ?
        </button>
      </header>
      <main id="main" tabIndex={-1}>
        <Problem text={(run ? (run.error ?? "") : `there is no run ${place.run}`)} />
        {run && !run.has_started && (
          <p class="empty" role="status">
            Waiting for the run {literal(run.name)}: its first episodes appear here.
          </p>
        )}
        {run && place.view === "episodes" && <Episodes place={place} run={run} />}
        {run && place.view === "episode" && <Episode place={place} run={run} />}
        {run && place.view === "groups" && <Groups place={place} revision={run.revision} />}
        {run && place.view === "training" && <Training key={place.run} place={place} runs={runs} />}
        {run && place.view === "time" && <Time place={place} run={run} />}
      </main>
      <dialog ref={help} aria-labelledby="keys">
        <h2 id="keys">Keys</h2>
        <dl>
          {KEYS.map(([key, meaning]) => (
            <>
              <dt>
                <kbd>{key}</kbd>
              </dt>
              <dd>{meaning}</dd>
            </>
          ))}
        </dl>
        <form method="dialog">
          <button>Close</button>
        </form>
      </dialog>
    </>
  );
}

render(<App />, document.getElementById("app")!);
