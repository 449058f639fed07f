// Images of the next message: chosen, pasted or dropped, shown before they are sent. They leave the page as data URLs.

import { el, iconButton } from "./dom.js";
import { currentModel } from "./models.js";
import { refreshSend } from "./render.js";
import { toast } from "./toast.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const SMALL = 100_000; // bytes of a file that is sent as it is
const SIDE = 768; // pixels of a larger one; conversations are stored in 4 million characters
let waiting = [];

export const takesImages = () => Boolean(currentModel()?.images);

/** The images of the next message, which are then sent. */
export function takeImages() {
  const taken = waiting;
  waiting = [];
  showImages();
  return taken;
}

function waitingElement(src, at) {
  const remove = () => (waiting.splice(at, 1), showImages());
  const image = el("img", { src, alt: t("image_number", { n: at + 1 }) });
  return el("span", {}, image, iconButton("close", t("image_remove"), remove));
}

/** Shows the button if the model takes images, and the images that wait. */
export function showImages() {
  $("attach").hidden = !takesImages();
  $("pictures").hidden = waiting.length === 0;
  $("pictures").replaceChildren(...waiting.map(waitingElement));
  refreshSend();
}

async function add(files) {
  const images = [...files].filter(({ type }) => type.startsWith("image/"));
  if (images.length && !takesImages()) return toast(t("image_no_model"));
  for (const file of images) {
    try {
      waiting.push(await dataUrl(file));
    } catch {
      toast(t("image_failed", { name: file.name }));
    }
  }
  showImages();
}

async function dataUrl(file) {
  const bitmap = await createImageBitmap(file); // throws if it is no image
  if (file.size <= SMALL && TYPES.includes(file.type)) return read(file);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const size = (length) => Math.max(1, Math.round(length * scale));
  const canvas = el("canvas", { width: size(bitmap.width), height: size(bitmap.height) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function read(file) {
  const reader = new FileReader();
  return new Promise((resolve, reject) => {
    reader.onload = () => resolve(reader.result);
    reader.onerror = reject;
    reader.readAsDataURL(file);
  });
}

export function startImages() {
  $("attach").addEventListener("click", () => $("image-file").click());
  $("image-file").addEventListener("change", () => {
    add($("image-file").files);
    $("image-file").value = ""; // so that the same file can be chosen again
  });
  $("input").addEventListener("paste", (event) => {
    if ([...event.clipboardData.files].length) (event.preventDefault(), add(event.clipboardData.files));
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => (event.preventDefault(), add(event.dataTransfer.files)));
}
