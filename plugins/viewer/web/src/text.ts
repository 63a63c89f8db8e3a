// Text of models and tools, as text. Characters that are not seen, or that turn the direction of writing, become escapes.
const HARMFUL =
  /[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]|\p{Surrogate}/gu;

export function literal(text: string): string {
  return text.replace(HARMFUL, (found) => {
    const code = found.codePointAt(0)!;
    const digits = code.toString(16);
    return code < 256 ? `\\x${digits.padStart(2, "0")}` : code < 65536 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
  });
}

export function asText(value: unknown): string {
  if (typeof value === "string") return value;
  if (value === null || value === undefined) return "";
  if (Array.isArray(value) && value.every((part) => typeof part?.text === "string")) {
    return value.map((part) => part.text).join("");
  }
  return JSON.stringify(value, null, 2);
}

const MOST_WHOLE = 1e12;

/** A number in at most 15 characters: a whole one below a million millions in full, others with `digits` + 1 digits. */
export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < MOST_WHOLE) return value.toLocaleString("en");
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(digits + 1)));
}

/** The start of a text; a character of two units is not divided. */
export function cut(text: string, length: number): string {
  const isHigh = /[\ud800-\udbff]/.test(text.charAt(length - 1));
  return text.slice(0, isHigh && text.length > length ? length - 1 : length);
}

/** A text without its end if it is long, which is said. */
export function shorten(text: string, length: number): string {
  return text.length <= length ? literal(text) : `${literal(cut(text, length))} … (${number(text.length)} characters)`;
}

export function signed(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return value > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

/** A time in at most 11 characters; a number that JSON has not is null. */
export function seconds(value: number | null): string {
  if (value === null) return "–";
  if (value >= 1e6) return `${value.toExponential(2)} s`;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  return value < 1 ? `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

/** A log-probability, with the digits that tell two close ones apart. */
export function logProbability(value: number | null): string {
  if (value === null) return "–";
  return Math.abs(value) < 1e6 ? value.toFixed(5) : value.toExponential(5);
}

export function isSpecial(piece: string): boolean {
  return /^<[|｜].*[|｜]>$/.test(piece) || /^<\/?[a-z_]+>$/i.test(piece) || /^\[\/?[A-Z_]+\]$/.test(piece);
}
