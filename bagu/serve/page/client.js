// The page's HTTP client: /v1/models, /v1/vector_stores, /v1/chat/completions as a stream, /engine.

/** An error response of the server: its status, and the message of its body in OpenAI's shape. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refuse(response) {
  const text = await response.text();
  let message = text.slice(0, 500) || response.statusText;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // Not in OpenAI's shape, e.g. a proxy's page: the text is the message.
  }
  throw new ApiError(response.status, message);
}

export const models = (key) => get("v1/models", key);

export async function engine(key, signal) {
  const response = await fetch("engine", { headers: headers(key), signal });
  if (!response.ok) await refuse(response);
  return response.json();
}

async function get(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) await refuse(response);
  return (await response.json()).data;
}

/** The vector stores, the server's own indexes first. */
export const stores = (key) => get("v1/vector_stores?order=asc", key);

/** The passages of the file of a source. */
export const fileContent = ({ vector_store_id: store, file_id: file }, key) =>
  get(`v1/vector_stores/${encodeURIComponent(store)}/files/${encodeURIComponent(file)}/content`, key);

/** The parsed chunks of one answer until [DONE]. Aborting `signal` closes the connection, which aborts the request. */
export async function* chat(body, { key, signal }) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) await refuse(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.code ?? 500, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "the stream ended early");
}

/** The data of each server-sent event of a byte stream. A chunk may end anywhere, even inside a character. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      const lines = (rest + (value ?? "")).split("\n");
      rest = done ? "" : lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) {
        if (data.length) yield data.join("\n");
        return;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it rejects if the stream has already failed
  }
}
