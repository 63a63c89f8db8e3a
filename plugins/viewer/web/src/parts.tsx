import type { ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { get } from "./api";
import { countConnections, RECONNECTED } from "./live";
import { cut, literal } from "./text";

export interface Loaded<T> {
  value: T | null;
  error: string;
}

/**
 * Load from the API whenever the address changes. The old value stays until the new one is there, unless it is of
 * another path, episode or record, which must not be shown as this one.
 */
export function useLoaded<T>(path: string | null, parameters: Record<string, string | number | string[] | undefined> = {}): Loaded<T> {
  const of = JSON.stringify([path, parameters.key, parameters.record]);
  const [state, setState] = useState<Loaded<T> & { of: string; connection: number }>({ value: null, error: "", of, connection: 0 });
  const [attempt, setAttempt] = useState(0);
  const name = JSON.stringify([path, parameters, attempt]);
  useEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    const connection = countConnections();
    get<T>(path, parameters, stop.signal).then(
      (value) => stop.signal.aborted || setState({ value, error: "", of, connection }),
      (error) => stop.signal.aborted || setState((old) => ({ value: old.of === of ? old.value : null, error: String(error.message), of, connection })),
    );
    return () => stop.abort();
  }, [name]);
  useLayoutEffect(() => {
    if (!state.error) return;
    const again = () => setAttempt((count) => count + 1);
    // The server can be back before the answer of a request that it did not survive.
    if (state.connection !== countConnections()) again();
    addEventListener(RECONNECTED, again);
    return () => removeEventListener(RECONNECTED, again);
  }, [state]);
  return state.of === of ? state : { value: null, error: "" };
}

/** Call `press` for every key outside a field. One listener calls the newest render's function: a listener that each
 * render registers anew after its paint would give the second of two quick keys what the first one saw. */
export function useKeys(press: (event: KeyboardEvent) => void): void {
  const newest = useRef(press);
  newest.current = press;
  useEffect(() => {
    const call = (event: KeyboardEvent) => {
      // A key in a field or in the help is not for the view below.
      const isTaken = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement || document.querySelector("dialog[open]") !== null;
      if (!isTaken && !event.ctrlKey && !event.metaKey && !event.altKey) newest.current(event);
    };
    addEventListener("keydown", call);
    return () => removeEventListener("keydown", call);
  }, []);
}

const MARKS: Record<string, string> = { completed: "✓", truncated: "✂", timed_out: "⏱", aborted: "◼", failed: "✗" };

export function Status({ status }: { status: string }) {
  return (
    <span class={`status ${status}`}>
      <span aria-hidden="true">{MARKS[status] ?? "?"}</span> {status.replace("_", " ")}
    </span>
  );
}

const CLIPPED = 20_000;

/** A text of any origin, always as text; long ones are clipped until they are asked for. */
export function Text({ text, label }: { text: string; label?: string }) {
  const [all, setAll] = useState(false);
  const shown = all ? text : cut(text, CLIPPED);
  return (
    <div class="text" role="group" aria-label={label}>
      <bdi>{literal(shown)}</bdi>
      {shown.length < text.length && (
        <button class="more" onClick={() => setAll(true)}>
          show all {text.length.toLocaleString("en")} characters
        </button>
      )}
    </div>
  );
}

export function Problem({ text }: { text: string }) {
  return text ? (
    <p class="problem" role="alert">
      {literal(text)}
    </p>
  ) : null;
}

export function Fact({ name, children, title }: { name: string; children: ComponentChildren; title?: string }) {
  return (
    <div class="fact" title={title}>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

interface FieldProps {
  type: "search" | "number";
  value: string;
  onValue: (text: string) => void;
  id?: string;
  class?: string;
  placeholder?: string;
  min?: string;
  step?: string;
}

/** A field whose text counts when it is complete. Until then a render, which a running run causes at any time, keeps it. */
export function Field({ value, onValue, ...rest }: FieldProps) {
  const [draft, setDraft] = useState<string | null>(null);
  return (
    <input
      {...(rest as object)}
      value={draft ?? value}
      onInput={(event) => setDraft(event.currentTarget.value)}
      onChange={(event) => {
        setDraft(null);
        onValue(event.currentTarget.value);
      }}
    />
  );
}

export function Copy({ label, text }: { label: string; text: () => string | Promise<string> }) {
  const [result, setResult] = useState("");
  const timer = useRef(0);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(await text());
      setResult("copied");
    } catch (error) {
      setResult(`not copied: ${(error as Error).message}`);
    }
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => setResult(""), 3000);
  };
  return (
    <button onClick={copy} aria-live="polite">
      {result || label}
    </button>
  );
}
