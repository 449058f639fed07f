// MathML elements, as tex.js and commands.js build them.

const MATHML = "http://www.w3.org/1998/Math/MathML";

/** The formula uses unsupported TeX. */
export class Unsupported extends Error {}

/** A MathML element; an empty attribute is left out. */
export function m(tag, attributes, ...children) {
  const node = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) if (value) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const row = (nodes) => (nodes.length === 1 ? nodes[0] : m("mrow", {}, ...nodes));
export const space = (width) => m("mspace", { width: `${width}em` });
export const fence = (sign, more = {}) => m("mo", { stretchy: "false", ...more }, sign);
export const padded = (node) => m("mrow", {}, space(0.3), node, space(0.3));

/** Rows of cells; `columns` are the letters of an array's column specification. */
export function table(rows, name, columns = "") {
  const cell = (nodes, at) => m("mtd", { class: { l: "left", r: "right" }[columns[at]] ?? "" }, row(nodes));
  const displaystyle = name === "lines" ? "true" : "";
  return m("mtable", { class: name, displaystyle }, ...rows.map((cells) => m("mtr", {}, ...cells.map(cell))));
}
