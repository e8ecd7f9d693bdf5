// What charts.js uses of Observable Plot; esbuild leaves out the rest.
export { barX, dot, frame, gridX, line, plot, ruleX, ruleY, text, tickX } from "@observablehq/plot";
