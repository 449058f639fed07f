// The texts of the page in English and Chinese. `t(key, {name})` replaces `{name}`.

const WORDS = {
  other: ["中文", "English"],
  about: ["{rows} rows · goal {goal}", "{rows} 行 · 目标 {goal}"],
  settings: ["What if", "假如"],
  setting: ["setting", "可调参数"],
  context: ["context", "工况"],
  forecast: ["Predicted {goal}", "预测 {goal}"],
  band: ["90 % of next runs: {low} to {high}", "下一次运行有 90 % 在 {low} 到 {high}"],
  inside: ["like the data (distance {d} of its radius)", "在数据范围内（距离为半径的 {d}）"],
  outside: ["outside of the data ({d} radii); farthest in {column}", "超出数据范围（{d} 个半径）；{column} 偏离最大"],
  recommend: ["Recommend", "推荐"],
  from_now: ["from these settings", "从当前设定出发"],
  recent: ["latest rows of the process (CSV), to check for drift", "过程的最新数据（CSV），用于检查漂移"],
  answer: ["Recommendation", "推荐"],
  no_answer: ["Choose the context on the left, then ask.", "先在左侧选择工况，再点“推荐”。"],
  promise: ["promise {mean} {unit}, {side} {bound}", "承诺 {mean} {unit}，{side} {bound}"],
  least: ["at least", "至少"],
  most: ["at most", "至多"],
  nearest: ["nearest real runs", "最接近的真实运行"],
  experiment: ["Only as an experiment (outside of the data): {row}", "只可作为试验（超出数据范围）：{row}"],
  best: ["Best row of the data: {row}", "数据中最好的一行：{row}"],
  association: [
    "Associations in your data, not proven causes. Try a recommendation as an experiment first.",
    "这些是数据中的关联，不是已证明的因果。请先把推荐当作试验。",
  ],
  health: ["The data", "数据"],
  healthy: ["Nothing suspicious was found.", "没有发现可疑之处。"],
  models: ["Models, on rows they have not seen", "模型（在未见过的行上）"],
  model: ["model", "模型"],
  weight: ["weight", "权重"],
  split_forward: ["R² later rows", "R² 之后的行"],
  split_group: ["R² other batches", "R² 其他批次"],
  split_random: ["R² random rows", "R² 随机行"],
  report: ["Report", "报告"],
  roles: ["Roles, and a new table", "列的角色与新数据"],
  upload: ["CSV or Parquet file", "CSV 或 Parquet 文件"],
  fit: ["Fit with these roles", "按这些角色拟合"],
  fitting: ["Fitting; this takes up to two minutes…", "正在拟合，最多两分钟……"],
  reading: ["Reading {name}…", "正在读取 {name}……"],
  column: ["column", "列"],
  role: ["role", "角色"],
  goal: ["goal", "目标"],
  low: ["low", "下限"],
  high: ["high", "上限"],
  step: ["step", "步长"],
  limits: ["limits, e.g. purity >= 99.2; separated by ;", "限制，如 purity >= 99.2；用 ; 分隔"],
  history: ["Answers given", "已给出的回答"],
  none_yet: ["None yet.", "还没有。"],
  failed: ["{why}", "{why}"],
  working: ["Searching…", "正在搜索……"],
};

let column = 0;

export function setLanguage(language) {
  column = language === "zh" ? 1 : 0;
  document.documentElement.lang = column ? "zh-CN" : "en";
}

export const language = () => (column ? "zh" : "en");

export function t(key, facts = {}) {
  return WORDS[key][column].replace(/\{(\w+)\}/g, (_, name) => String(facts[name]));
}
