// Builds elements without HTML strings: text becomes text nodes, so text of a model or a user is never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `on` has the event listeners, `class` the class list; a null, undefined or false value is left out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An icon of the sprite in index.html. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button with an icon and the accessible name `label`. */
export function iconButton(name, label, click, props = {}) {
  const more = { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click }, ...props };
  return el("button", more, icon(name));
}

/** Copies text to the clipboard; over plain HTTP from another machine, browsers only have execCommand. */
export async function copy(text) {
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "hidden-text", value: text });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (!done) throw new Error("the browser refused to copy");
}

/** Downloads `text` as a file. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
