import { useEffect, useRef } from "preact/hooks";
import type { EpisodeRecord, Segment, Tokens } from "./api";
import { shade, visiblePiece } from "./tokens";
import { isSpecial, number } from "./text";

interface Part {
  block: number;
  paths: Map<number, Segment[]>;
}

/** Parts of a record in order: text outside of blocks, and blocks with their paths. */
export function splitBlocks(record: EpisodeRecord): Part[] {
  const parts: Part[] = [{ block: -1, paths: new Map([[-1, [{ origin: "prompt", start: 0, stop: record.num_prompt_tokens, block: -1, path: -1 }]]]) }];
  for (const segment of record.segments) {
    let part = parts[parts.length - 1];
    if (part.block !== segment.block) {
      part = { block: segment.block, paths: new Map() };
      parts.push(part);
    }
    part.paths.set(segment.path, [...(part.paths.get(segment.path) ?? []), segment]);
  }
  return parts;
}

function Run({ tokens, segments }: { tokens: Tokens; segments: Segment[] }) {
  return (
    <p class="run">
      {segments.flatMap((segment) =>
        Array.from({ length: segment.stop - segment.start }, (_, at) => {
          const index = segment.start + at;
          const special = tokens.pieces !== null && isSpecial(tokens.pieces[index]);
          return <span class={`token ${segment.origin}${shade(tokens.logprobs[index])}${special ? " special" : ""}`}>{visiblePiece(tokens, index)}</span>;
        }),
      )}
    </p>
  );
}

export function Paths({ tokens, record }: { tokens: Tokens; record: EpisodeRecord }) {
  return (
    <div class="paths">
      <div>
        {splitBlocks(record).map((part) =>
          part.block < 0 ? (
            <Run tokens={tokens} segments={[...part.paths.values()].flat()} />
          ) : (
            <section class="block" aria-label={`Block ${part.block + 1} with ${part.paths.size} paths`}>
              <h3>
                Block {part.block + 1}: {part.paths.size} paths that do not see each other
              </h3>
              <div class="columns">
                {[...part.paths].map(([path, segments]) => (
                  <article class="path" aria-label={`Path ${path + 1}`}>
                    <h4>
                      Path {path + 1}
                      <span class="dim"> {number(segments.reduce((sum, each) => sum + each.stop - each.start, 0))} tokens from position {tokens.position_ids[segments[0].start]}</span>
                    </h4>
                    <Run tokens={tokens} segments={segments} />
                  </article>
                ))}
              </div>
            </section>
          ),
        )}
      </div>
      <Mask tokens={tokens} />
    </div>
  );
}

const SIZE = 384;

/** The attention mask: row q has a mark in column k where token q sees token k. */
function Mask({ tokens }: { tokens: Tokens }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(() => {
    const draw = canvas.current?.getContext("2d");
    if (!draw) return;
    const count = tokens.ids.length;
    const style = getComputedStyle(canvas.current!);
    const colors = tokens.origin_names.map((name) => style.getPropertyValue(`--${name}`));
    draw.fillStyle = style.getPropertyValue("--hidden");
    draw.fillRect(0, 0, SIZE, SIZE);
    const cell = Math.max(1, SIZE / count);
    for (let y = 0; y < Math.min(SIZE, count); y++) {
      const q = count <= SIZE ? y : Math.floor((y * count) / SIZE);
      draw.fillStyle = colors[tokens.origins[q]];
      // A token sees all before its block, and its own path: two stretches.
      const before = Math.min(tokens.block_start[q], q + 1);
      const scale = SIZE / count;
      draw.fillRect(0, y * cell, before * scale, cell);
      draw.fillRect(tokens.path_start[q] * scale, y * cell, (q + 1 - tokens.path_start[q]) * scale, cell);
    }
  }, [tokens]);
  return (
    <figure class="mask">
      <canvas ref={canvas} width={SIZE} height={SIZE} role="img" aria-label="Attention mask: each row is a token, and the filled columns are the tokens that it sees" />
      <figcaption>Each row is a token; it sees the filled columns.</figcaption>
    </figure>
  );
}
