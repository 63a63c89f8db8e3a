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

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(digits + 1)));
}

export function signed(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return value > 0 ? `+${number(value)}` : number(value).replace("-", "−");
}

export function seconds(value: number): string {
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  return value < 1 ? `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export function isSpecial(piece: string): boolean {
  return /^<[|｜].*[|｜]>$/.test(piece) || /^<\/?[a-z_]+>$/i.test(piece) || /^\[\/?[A-Z_]+\]$/.test(piece);
}
