// The two boxes with JSON in the settings: a schema that the answer must fit, and the tools that the model may call.

import { t } from "./words.js";

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, population: { type: "integer" } },
  required: ["city", "population"],
  additionalProperties: false,
};
export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The current weather in a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** `{value, error}` of a box: both are null if it is empty, and one of them otherwise. */
function parsed(text, fits, expected) {
  if (!text.trim()) return { value: null, error: null };
  try {
    const value = JSON.parse(text);
    return fits(value) ? { value, error: null } : { value: null, error: expected };
  } catch (error) {
    return { value: null, error: t("not_json", { why: error.message }) };
  }
}

export const parsedSchema = (text) => parsed(text, isObject, t("schema_object"));

export const parsedTools = (text) =>
  parsed(text, (value) => Array.isArray(value) && value.length > 0 && value.every(isObject), t("tools_list"));

/** Why `text` is not JSON; null if it is. */
export function jsonError(text) {
  try {
    JSON.parse(text);
    return null;
  } catch (error) {
    return error.message;
  }
}
