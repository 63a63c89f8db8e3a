// Builds the page into the package: `make viewer`. `sources.sha256` lets a test see whether the result is up to date.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const out = "../src/turnwise_viewer/static";
mkdirSync(out, { recursive: true });
await build({
  entryPoints: ["src/app.tsx", "src/app.css"],
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "inline",
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) copyFileSync(`src/${name}`, `${out}/${name}`);

const digest = createHash("sha256");
const sources = readdirSync("src").sort().map((name) => `src/${name}`);
for (const name of ["build.mjs", "package-lock.json", "tsconfig.json", ...sources]) {
  digest.update(`${name}\n`).update(readFileSync(name)).update("\n");
}
writeFileSync(`${out}/sources.sha256`, `${digest.digest("hex")}\n`);
