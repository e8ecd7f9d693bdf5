// Bundles what entry.js names into the package, and the licences of every library that ended up in the bundle.
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const target = new URL("../../specbench/reporting/scripts/", import.meta.url).pathname;
const made = await build({
  entryPoints: ["entry.js"],
  bundle: true,
  minify: true,
  charset: "ascii",
  format: "iife",
  globalName: "Plot",
  target: "es2020",
  metafile: true,
  legalComments: "none",
  outfile: `${target}observable-plot.min.js`,
});
const [output] = Object.values(made.metafile.outputs);
const packages = new Set(
  Object.entries(output.inputs)
    .filter(([path, input]) => path.startsWith("node_modules/") && input.bytesInOutput > 0)
    .map(([path]) => path.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)/)[1]),
);
const licences = [...packages].sort().map((name) => {
  const folder = `node_modules/${name}/`;
  const { version, license } = JSON.parse(readFileSync(`${folder}package.json`, "utf8"));
  const file = readdirSync(folder).find((entry) => /^(licen[cs]e|unlicense)/i.test(entry));
  const text = file ? readFileSync(folder + file, "utf8").trim() : "(no licence text in the package)";
  return `${name} ${version} (${license})\n\n${text}\n`;
});
const rule = `\n${"-".repeat(78)}\n\n`;
writeFileSync(`${target}observable-plot.licences.txt`, licences.join(rule));
