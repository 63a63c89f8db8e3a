// Pictures of messages and records. Their files are in the folder `media` of the run, or in the exported page.
import { useEffect, useState } from "preact/hooks";
import type { Episode } from "./api";
import { isExported, readPicture } from "./exported";
import { asText, literal, number, shorten } from "./text";

/** An episode with pictures, and the number of its run. */
export interface Source {
  run: number;
  episode: Episode;
}

type Part = string | { url: string };

/** The texts and the URLs of the pictures of a content; null for a content without pictures. */
export function divide(content: unknown): Part[] | null {
  if (!Array.isArray(content)) return null;
  const parts = content.map((part): Part => (part?.type === "image_url" ? { url: String(part.image_url?.url ?? "") } : asText(part?.type === "text" ? part.text : part)));
  return parts.some((part) => typeof part !== "string") ? parts : null;
}

/** A content as a text, with a word for each picture. */
export function withoutPictures(content: unknown): string {
  const parts = divide(content);
  return parts === null ? asText(content) : parts.map((part) => (typeof part === "string" ? part : " [picture] ")).join("");
}

/** The beginning of a file's name, and its size. */
function describe(url: string, bytes: number): string {
  const name = /^media\/([0-9a-f]{12})[0-9a-f]*(\.[a-z]+)$/.exec(url);
  return `picture ${name ? name[1] + name[2] : shorten(url, 40)}, ${number(bytes)} bytes`;
}

export function Picture({ url, source }: { url: string; source: Source }) {
  const { run, episode } = source;
  const file = episode.pictures[url];
  const [address, setAddress] = useState(isExported ? "" : `api/v1/runs/${run}/picture?${new URLSearchParams({ key: episode.key, name: url })}`);
  const [problem, setProblem] = useState(file === undefined ? "it is no file of the run" : (file.problem ?? ""));
  useEffect(() => {
    if (!isExported || problem) return;
    readPicture(run, url).then(
      (found) => (found === null ? setProblem("left out of this file, for its size; --max-mb allows more") : setAddress(found)),
      (error) => setProblem(String(error.message)),
    );
  }, []);
  const name = describe(url, file?.bytes ?? 0);
  if (problem) {
    return (
      <p class="picture dim">
        {file === undefined ? `picture ${shorten(url, 40)}` : name}: {literal(problem)}
      </p>
    );
  }
  return (
    <figure class="picture">
      {address && <img src={address} alt={name} loading="lazy" onError={() => setProblem("the browser cannot show its file")} />}
      <figcaption class="dim">{name}</figcaption>
    </figure>
  );
}

/** The picture of a run of placeholder tokens, folded. It is no part of the list of tokens, whose items are tokens alone. */
export function PlacedPicture({ start, length, url, source }: { start: number; length: number; url: string; source: Source }) {
  const [isOpen, setOpen] = useState(false);
  return (
    <details onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>
        picture at tokens {start} to {start + length - 1}
      </summary>
      {isOpen && <Picture url={url} source={source} />}
    </details>
  );
}
