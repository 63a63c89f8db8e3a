// The words in which two texts differ.

/** A part of a text, and whether the other text has it at this place. */
export type Part = [text: string, isShared: boolean];

const MOST_PAIRS = 4_000_000;

/** Split two texts into parts that both have, in order, and parts that one has: the longest common sequence of words. */
export function difference(left: string, right: string): [Part[], Part[]] {
  const [a, b] = [left, right].map((text) => text.match(/\s+|[^\s]+/g) ?? []);
  let start = 0;
  while (start < Math.min(a.length, b.length) && a[start] === b[start]) start++;
  let end = 0;
  while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const shared = commonWords(a.slice(start, a.length - end), b.slice(start, b.length - end));
  const whole = (words: string[], inside: Set<number>) => join(words, (index) => index < start || index >= words.length - end || inside.has(index - start));
  return [whole(a, shared[0]), whole(b, shared[1])];
}

/** Return the places of a longest common sequence in both lists; none for lists that are too long to compare. */
function commonWords(a: string[], b: string[]): [Set<number>, Set<number>] {
  const found: [Set<number>, Set<number>] = [new Set(), new Set()];
  const width = b.length + 1;
  if ((a.length + 1) * width > MOST_PAIRS) return found;
  const length = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      length[i * width + j] = a[i] === b[j] ? length[(i + 1) * width + j + 1] + 1 : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) {
      found[0].add(i++);
      found[1].add(j++);
    } else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i++;
    else j++;
  }
  return found;
}

function join(words: string[], isShared: (index: number) => boolean): Part[] {
  const parts: Part[] = [];
  words.forEach((word, index) => {
    const last = parts[parts.length - 1];
    if (last && last[1] === isShared(index)) last[0] += word;
    else parts.push([word, isShared(index)]);
  });
  return parts;
}
