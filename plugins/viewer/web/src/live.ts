// The runs, as the server tells them by server-sent events: at the start, and after each change of their files.
import { useEffect, useState } from "preact/hooks";
import { get, type Run } from "./api";
import { isExported } from "./exported";

export interface Runs {
  runs: Run[] | null;
  error: string;
  /** Whether the server is there: a page follows its runs as long as it is. */
  connected: boolean;
}

const RETRY_MS = 1000;

/** Views that could not load ask again when this event says that the server is back. */
export const RECONNECTED = "turnwise-reconnected";

let connections = 0;
addEventListener(RECONNECTED, () => (connections += 1));

/** How often the server came back: a request that began before another number may have failed for that reason. */
export function countConnections(): number {
  return connections;
}

export function useRuns(): Runs {
  const [state, setState] = useState<Runs>({ runs: null, error: "", connected: false });
  useEffect(() => {
    if (isExported) {
      get<{ runs: Run[] }>("runs").then(
        ({ runs }) => setState({ runs, error: "", connected: true }),
        (error) => setState({ runs: null, error: String(error.message), connected: false }),
      );
      return;
    }
    return follow(setState);
  }, []);
  return state;
}

function follow(setState: (change: (before: Runs) => Runs) => void): () => void {
  let source: EventSource | null = null;
  let timer = 0;
  const open = () => {
    source = new EventSource("api/v1/events");
    source.addEventListener("runs", (event) => {
      const { runs } = JSON.parse((event as MessageEvent<string>).data) as { runs: Run[] };
      setState((before) => {
        if (before.error) queueMicrotask(() => dispatchEvent(new Event(RECONNECTED)));
        return { runs, error: "", connected: true };
      });
    });
    source.addEventListener("error", () => {
      setState((before) => ({ ...before, error: "the server does not answer; trying again", connected: false }));
      // A browser tries again after a broken connection, and not after an answer that is no stream.
      if (source?.readyState === EventSource.CLOSED) timer = window.setTimeout(open, RETRY_MS);
    });
  };
  const close = () => {
    clearTimeout(timer);
    source?.close();
    source = null;
  };
  // A browser has six connections for all pages of a server, so a page that is not seen gives up its stream.
  const change = () => {
    close();
    if (!document.hidden) open();
  };
  change();
  document.addEventListener("visibilitychange", change);
  return () => {
    document.removeEventListener("visibilitychange", change);
    close();
  };
}
