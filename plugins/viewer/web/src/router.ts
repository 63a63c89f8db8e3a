// The address after `#` names the view, so that every view, episode, turn and token has a link.
import { useEffect, useState } from "preact/hooks";

export interface Place {
  run: number;
  view: string;
  query: URLSearchParams;
}

export function readPlace(hash: string): Place {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  const [run, view] = path.split("/");
  return { run: Number.parseInt(run, 10) || 0, view: view || "episodes", query: new URLSearchParams(query ?? "") };
}

export function link(run: number, view: string, query: Record<string, string | number | undefined> = {}): string {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== "") found.set(name, String(value));
  }
  const text = found.toString();
  return `#/${run}/${view}${text ? `?${text}` : ""}`;
}

export function usePlace(): Place {
  const [, render] = useState(0);
  useEffect(() => {
    // A count and not the address: that can be the one of an earlier event again, after a render between the two.
    const change = () => render((count) => count + 1);
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  // The address itself and not a copy: a render between a change and its event would put an old text into a field.
  return readPlace(location.hash);
}

/** Change parameters of the address, without a new entry in the history. */
export function replaceQuery(changes: Record<string, string | number | undefined>): void {
  const place = readPlace(location.hash);
  const all = Object.fromEntries(place.query.entries());
  location.replace(link(place.run, place.view, { ...all, ...changes }));
}
