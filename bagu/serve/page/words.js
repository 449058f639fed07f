// The texts of the page in English and Chinese. `t(key, {name})` replaces `{name}`.

const WORDS = {
  new_chat: ["New chat", "新对话"],
  chats: ["Conversations", "对话"],
  no_chats: ["Nothing here yet.", "还没有对话。"],
  untitled: ["New chat", "新对话"],
  rename: ["Rename", "重命名"],
  delete: ["Delete", "删除"],
  export: ["Export as JSON", "导出为 JSON"],
  deleted: ["Deleted “{title}”.", "已删除“{title}”。"],
  undo: ["Undo", "撤销"],
  sidebar: ["Show or hide conversations", "显示或隐藏对话"],
  theme: ["Light or dark", "浅色或深色"],
  language: ["中文 (Chinese)", "English (英文)"],
  probabilities: ["Token probabilities", "词元概率"],
  settings: ["Settings", "设置"],
  engine: ["Engine", "引擎"],
  model: ["Model", "模型"],
  close: ["Close", "关闭"],
  ask: ["Message", "输入消息"],
  send: ["Send", "发送"],
  stop: ["Stop", "停止"],
  latest: ["Jump to the latest", "跳到最新"],
  keys: [
    "Enter sends · Shift+Enter new line · Esc stops · Ctrl+K new chat · ↑ edits the last message",
    "Enter 发送 · Shift+Enter 换行 · Esc 停止 · Ctrl+K 新对话 · ↑ 编辑上一条",
  ],
  hello: ["Ask anything", "问点什么"],
  private: [
    "Answers come from the server of this page. Conversations stay in this browser.",
    "回答来自本页面的服务器，对话只保存在这个浏览器里。",
  ],
  example_1: ["Explain PagedAttention in three sentences.", "用三句话解释 PagedAttention。"],
  example_2: ["Write a Python function that merges two sorted lists.", "写一个合并两个有序列表的 Python 函数。"],
  example_3: ["Why is decoding bound by memory and prefill by compute?", "为什么解码受限于访存，而预填充受限于计算？"],
  you: ["You", "你"],
  assistant: ["Assistant", "助手"],
  copy: ["Copy", "复制"],
  copied: ["Copied", "已复制"],
  edit: ["Edit", "编辑"],
  regenerate: ["Regenerate", "重新生成"],
  save_send: ["Send", "发送"],
  cancel: ["Cancel", "取消"],
  retry: ["Try again", "重试"],
  thinking: ["Waiting for the first token", "等待第一个词元"],
  thought_open: ["Thinking… {time}", "思考中…… {time}"],
  thought: ["Thought for {time}", "思考了 {time}"],
  thought_untimed: ["Thoughts", "思考过程"],
  seconds: ["{n} s", "{n} 秒"],
  minutes: ["{m} min {n} s", "{m} 分 {n} 秒"],
  finished: ["The answer is complete.", "回答完毕。"],
  system: ["System prompt", "系统提示"],
  system_hint: ["How the assistant should behave. For this conversation.", "助手应当如何表现。只对本对话有效。"],
  sampling: ["Sampling", "采样"],
  temperature: ["Temperature", "温度"],
  temperature_hint: ["0 always takes the most likely token", "0 表示总取概率最大的词元"],
  top_p: ["Top-p", "Top-p"],
  top_k: ["Top-k", "Top-k"],
  min_p: ["Min-p", "Min-p"],
  max_tokens: ["Max tokens", "最多词元数"],
  seed: ["Seed", "随机种子"],
  repetition_penalty: ["Repetition penalty", "重复惩罚"],
  presence_penalty: ["Presence penalty", "存在惩罚"],
  frequency_penalty: ["Frequency penalty", "频率惩罚"],
  off: ["off", "关"],
  auto: ["auto", "自动"],
  random: ["random", "随机"],
  reset: ["Reset", "恢复默认"],
  api_key: ["API key", "API 密钥"],
  api_key_hint: ["Only if the server asks for one. Kept until the tab closes.", "服务器要求时才需要，关闭标签页后清除。"],
  tokens_per_s: ["tokens/s", "词元/秒"],
  batch: ["Sequences in the batch", "批内序列数"],
  running: ["Requests running", "运行中的请求"],
  waiting: ["Requests waiting", "排队的请求"],
  ttft: ["TTFT p50", "首词元延迟 p50"],
  tick: ["Step", "单步耗时"],
  preemptions: ["Preemptions", "抢占次数"],
  prefix_hits: ["Prefix hits", "前缀命中"],
  draft_accept: ["Drafts accepted", "草稿接受率"],
  tokens_per_draft: ["Tokens per verified draft", "每次验证所得词元"],
  blocks: ["KV blocks", "KV 块"],
  used: ["used", "使用中"],
  cached: ["cached", "已缓存"],
  free: ["free", "空闲"],
  blocks_label: [
    "{used} blocks used, {cached} cached, {free} free of {total}",
    "共 {total} 块：使用中 {used}，已缓存 {cached}，空闲 {free}",
  ],
  cell: ["one square = {n} blocks", "每格 = {n} 块"],
  last_minute: ["tokens/s over the last minute", "最近一分钟的词元/秒"],
  engine_gone: ["The engine does not answer: {why}", "引擎没有响应：{why}"],
  unreachable: ["The server cannot be reached.", "无法连接服务器。"],
  server_gone: ["The server cannot be reached. Trying again…", "无法连接服务器，正在重试……"],
  need_key: ["This server asks for an API key: see Settings.", "服务器需要 API 密钥：请见设置。"],
  storage_full: ["The browser's storage is full: this chat is not kept. Delete an older one.", "浏览器存储已满，本对话未保存，请删除旧对话。"],
  meta_tokens: ["{n} tokens", "{n} 个词元"],
  meta_speed: ["{n} tokens/s", "{n} 词元/秒"],
  meta_ttft: ["first token {n} ms", "首词元 {n} ms"],
  finish_length: ["cut at the token limit", "达到长度上限"],
  finish_abort: ["stopped", "已停止"],
  token_keys: ["Tokens coloured by probability; arrow keys move between them", "按概率着色的词元；方向键移动"],
  likely: ["likely", "可能"],
  surprising: ["surprising", "意外"],
};

let column = 0;

export function setLanguage(language) {
  column = language === "zh" ? 1 : 0;
  document.documentElement.lang = column ? "zh" : "en";
}

export function t(key, values = {}) {
  if (!WORDS[key]) throw new Error(`there are no words for ${key}`);
  return WORDS[key][column].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

/** Translates the elements under `root`: data-t is the text, data-t-label the name, data-t-hint the placeholder. */
export function translate(root = document) {
  for (const node of root.querySelectorAll("[data-t]")) node.textContent = t(node.dataset.t);
  for (const node of root.querySelectorAll("[data-t-label]")) {
    node.setAttribute("aria-label", t(node.dataset.tLabel));
    if (node.tagName === "BUTTON") node.title = t(node.dataset.tLabel);
  }
  for (const node of root.querySelectorAll("[data-t-hint]")) node.placeholder = t(node.dataset.tHint);
}
