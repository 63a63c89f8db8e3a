import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Episode, EpisodeRecord, Tokens, Turn } from "./api";
import { Picture, PlacedPicture, type Source } from "./pictures";
import { replaceQuery } from "./router";
import { isSpecial, literal, logProbability, number } from "./text";

// Records have up to some ten thousands of tokens; only chunks near the visible part are in the page. A chunk is a block
// of its own, so it ends with a line where one ends soon.
const CHUNK = 200;
const MOST = 400;
const TOKEN_WIDTH = 42;
const LINE = 27;

export const ORIGINS: Record<string, string> = {
  prompt: "the prompt: no mark",
  action: "sampled by the policy and trained: solid line",
  observation: "from a tool, a user or the environment: dotted line",
  forced: "inserted by the harness: double line",
  replayed: "sampled in another record, which trains it: dashed line",
  constrained: "sampled under a grammar, and not trained: wavy line",
};

export function shade(logprob: number | null): string {
  if (logprob === null) return "";
  // Ten levels of the probability of the sampled token; a rare token is dark.
  return ` p${Math.min(9, Math.floor(10 * (1 - Math.exp(logprob))))}`;
}

/** The first token of each chunk, and the number of tokens behind them. */
export function chunkBounds(pieces: string[] | null, count: number): number[] {
  const bounds = [0];
  for (let from = 0; from < count; from = bounds[bounds.length - 1]) {
    let to = from + CHUNK;
    while (pieces !== null && to < Math.min(count, from + MOST) && !pieces[to - 1].includes("\n")) to++;
    const endsLine = pieces !== null && pieces[to - 1]?.includes("\n");
    bounds.push(Math.min(count, endsLine ? to : from + CHUNK));
  }
  return bounds;
}

export function visiblePiece(tokens: Tokens, index: number): string {
  const piece = tokens.pieces?.[index];
  if (piece === undefined) return String(tokens.ids[index]);
  return piece === "" ? "◦" : literal(piece).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥");
}

/** The limit that a turn used up, in words; empty if it ended before. Files do not have the reason why a turn ended. */
export function limitOf(episode: Episode, turn: Turn | undefined): string {
  const limit = episode.turn_limit;
  return limit !== null && turn && turn[1] - turn[0] === limit ? `used all ${number(limit)} tokens of a turn` : "";
}

export function TokenView({ tokens, record, source, start }: { tokens: Tokens; record: EpisodeRecord; source: Source; start: number | null }) {
  const { episode } = source;
  const [chosen, setChosen] = useState(start ?? 0);
  const view = useRef<HTMLDivElement>(null);
  const marks = useMemo(() => findMarks(source, record, tokens), [episode, record, tokens]);
  const count = tokens.ids.length;
  const bounds = useMemo(() => chunkBounds(tokens.pieces, count), [tokens]);
  const budget = episode.response_budget;
  const numResponse = count - tokens.num_prompt_tokens;
  const isCut = episode.status === "truncated" || episode.status === "timed_out";

  const indexOf = (event: Event): number | null => {
    const found = (event.target as HTMLElement).closest<HTMLElement>("[data-i]");
    return found ? Number(found.dataset.i) : null;
  };
  const press = (event: KeyboardEvent) => {
    const steps: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20, PageDown: 500, PageUp: -500, Home: -count, End: count };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const next = Math.min(count - 1, Math.max(0, chosen + steps[event.key]));
    setChosen(next);
    replaceQuery({ token: next });
    reveal(next);
  };
  // The tokens of a far chunk are in the page some time after the chunk was scrolled to, and chunks above it then get
  // their real heights. So this token is shown again after each change, until the user does something.
  const awaited = useRef<number | null>(null);
  const reveal = (index: number) => {
    awaited.current = index;
    const from = bounds.findLast((bound) => bound <= index);
    view.current?.querySelector(`[data-chunk="${from}"]`)?.scrollIntoView({ block: "nearest" });
    showAwaited();
  };
  const showAwaited = useCallback(() => {
    view.current?.querySelector(`[data-i="${awaited.current}"]`)?.scrollIntoView({ block: "nearest" });
  }, []);
  useEffect(() => {
    if (start !== null) reveal(start);
    const forget = () => {
      awaited.current = null;
    };
    const actions = ["wheel", "keydown", "pointerdown", "touchmove"];
    // Before the listeners of elements: a key may then choose the next token to show.
    for (const name of actions) addEventListener(name, forget, { capture: true, passive: true });
    return () => {
      for (const name of actions) removeEventListener(name, forget, { capture: true });
    };
  }, []);
  const chunks = bounds.slice(1).map((to, number) => {
    const from = bounds[number];
    return <Chunk key={from} from={from} to={to} tokens={tokens} marks={marks} chosen={chosen >= from && chosen < to ? chosen : -1} onShown={showAwaited} />;
  });
  return (
    <div class="tokens">
      <div>
        <Legend tokens={tokens} />
        {budget !== null && (
          <p class="budget">
            <meter aria-hidden="true" min={0} max={budget} value={numResponse} /> {number(numResponse)} of at most {number(budget)} response tokens
          </p>
        )}
        {tokens.pieces === null && <p class="dim">Ids without text: {literal(tokens.no_pieces_because ?? "")}</p>}
        {tokens.pictures.length > 0 && (
          <div class="pictures" role="group" aria-label="Pictures of the record">
            {tokens.pictures.map(([from, length, name]) => (
              <PlacedPicture key={from} start={from} length={length} url={name} source={source} />
            ))}
          </div>
        )}
        <div
          ref={view}
          class="tokenview"
          role="listbox"
          aria-label={`${count} tokens`}
          aria-activedescendant={`t${chosen}`}
          tabIndex={0}
          onKeyDown={press}
          // Not mouseover: a scroll by a key moves another token under the mouse that rests.
          onMouseMove={(event) => {
            const index = indexOf(event);
            if (index !== null) setChosen(index);
          }}
          onClick={(event) => {
            const index = indexOf(event);
            if (index !== null) replaceQuery({ token: index });
          }}
        >
          {chunks}
          <div class="end">
            {isCut ? `✂ ${episode.status.replace("_", " ")} here` : "end of the record"}: {number(numResponse)} response tokens after a prompt of {number(tokens.num_prompt_tokens)}
            {budget !== null && (numResponse < budget ? `, ${number(budget - numResponse)} tokens of the budget of ${number(budget)} are left` : `, the budget of ${number(budget)} tokens is used up`)}
          </div>
        </div>
      </div>
      <Detail tokens={tokens} record={record} index={chosen} marks={marks} />
    </div>
  );
}

/** Rewards by the token that they are credited to, limits by the last token of the turn that used them up, and the
 * length and the file of each picture by its first token. */
interface Marks {
  source: Source;
  pictures: Map<number, [length: number, name: string]>;
  credits: Map<number, number>;
  limits: Map<number, string>;
}

function findMarks(source: Source, record: EpisodeRecord, tokens: Tokens): Marks {
  const limits = record.turns.map((turn): [number, string] => [turn[1] - 1, limitOf(source.episode, turn)]);
  const pictures = tokens.pictures.map(([start, length, name]): [number, [number, string]] => [start, [length, name]]);
  return { source, pictures: new Map(pictures), credits: new Map(record.score?.credits ?? []), limits: new Map(limits.filter(([, text]) => text)) };
}

interface ChunkProps {
  from: number;
  to: number;
  tokens: Tokens;
  marks: Marks;
  chosen: number;
  onShown: () => void;
}

function Chunk({ from, to, tokens, marks, chosen, onShown }: ChunkProps) {
  const [near, setNear] = useState(from === 0);
  const [height, setHeight] = useState(0);
  const own = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const element = own.current!;
    const watch = new IntersectionObserver(([entry]) => setNear(entry.isIntersecting), { root: element.parentElement, rootMargin: "1200px" });
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (near && own.current) setHeight(own.current.offsetHeight);
    if (near) onShown();
  }, [near]);
  const spans = useMemo(() => (near ? makeSpans(from, to, tokens, marks) : null), [near, tokens, marks]);
  useEffect(() => {
    if (!near || chosen < 0) return;
    const token = own.current!.querySelector(`[data-i="${chosen}"]`);
    token?.classList.add("chosen");
    token?.setAttribute("aria-selected", "true");
    return () => {
      token?.classList.remove("chosen");
      token?.setAttribute("aria-selected", "false");
    };
  }, [near, chosen]);
  const guess = height || Math.ceil(((to - from) * TOKEN_WIDTH) / 900) * LINE;
  return (
    <div ref={own} class="chunk" role="presentation" data-chunk={from} style={near ? undefined : { height: `${guess}px` }}>
      {spans}
    </div>
  );
}

function makeSpans(from: number, to: number, tokens: Tokens, marks: Marks) {
  const spans = [];
  for (let index = from; index < to; index++) {
    const origin = tokens.origin_names[tokens.origins[index]];
    const special = tokens.pieces !== null && isSpecial(tokens.pieces[index]);
    const credit = marks.credits.get(index);
    const limit = marks.limits.get(index);
    const picture = marks.pictures.get(index);
    if (picture !== undefined) {
      spans.push(
        <span role="presentation" class="placed">
          ▧ {number(picture[0])} {picture[0] === 1 ? "token" : "tokens"} of a picture
        </span>,
      );
    }
    spans.push(
      <span role="option" id={`t${index}`} aria-selected="false" data-i={index} class={`token ${origin}${shade(tokens.logprobs[index])}${special ? " special" : ""}`}>
        {visiblePiece(tokens, index)}
      </span>,
    );
    if (credit !== undefined) {
      spans.push(
        <span role="presentation" class="credit" title={`reward ${credit} is credited to token ${index}`}>
          ★ {number(credit)}
        </span>,
      );
    }
    if (limit !== undefined) {
      spans.push(
        <span role="presentation" class="limit">
          ✂ {limit}
        </span>,
      );
    }
  }
  return spans;
}

export function Legend({ tokens }: { tokens: Tokens }) {
  const used = new Set(tokens.origins);
  return (
    <p class="legend">
      {tokens.origin_names.map((name, index) => used.has(index) && (
        <span class={`token ${name}`} title={ORIGINS[name]}>
          {name}
        </span>
      ))}
      <span class="scale">
        likely
        {[0, 2, 4, 6, 8, 9].map((level) => (
          <i class={`token p${level}`} aria-hidden="true">
            {" "}
          </i>
        ))}
        unlikely
      </span>
    </p>
  );
}

function Detail({ tokens, record, index, marks }: { tokens: Tokens; record: EpisodeRecord; index: number; marks: Marks }) {
  const logprob = tokens.logprobs[index];
  const segment = record.segments.find((each) => index >= each.start && index < each.stop);
  const turn = record.turns.findIndex(([start, stop]) => index >= start && index < stop);
  const limit = turn < 0 ? undefined : marks.limits.get(record.turns[turn][1] - 1);
  const piece = tokens.pieces?.[index];
  const facts: [string, string][] = [
    ["token", `${index} of ${tokens.ids.length}`],
    ["id", String(tokens.ids[index])],
    ["text", piece === undefined ? "–" : piece === "" ? "part of the next character" : literal(JSON.stringify(piece))],
    ["origin", tokens.origin_names[tokens.origins[index]]],
    ["in the loss", tokens.mask[index] ? "yes" : "no"],
    ["log-probability", logProbability(logprob)],
    ["probability", logprob === null ? "–" : number(Math.exp(logprob))],
    ["weight version", String(tokens.weight_versions[index] ?? "–")],
    ["position", String(tokens.position_ids[index])],
    ["turn", turn < 0 ? "–" : `${turn + 1}${limit ? `, ${limit}` : ""}`],
    ["path", segment && segment.block >= 0 ? `${segment.path} of block ${segment.block}` : "–"],
    ["advantage", number(tokens.advantages?.[index])],
    ["reward here", number(marks.credits.get(index))],
    ...Object.entries(tokens.open_columns).map(([name, values]): [string, string] => [name, values[index] ?? "–"]),
  ];
  const picture = [...marks.pictures].find(([start, [length]]) => index >= start && index < start + length);
  return (
    <aside class="detail" aria-label="The chosen token">
      {picture && <Picture key={picture[0]} url={picture[1][1]} source={marks.source} />}
      <dl>
        {facts.map(([name, value]) => (
          <>
            <dt>{name}</dt>
            <dd>
              <bdi>{value}</bdi>
            </dd>
          </>
        ))}
      </dl>
    </aside>
  );
}
