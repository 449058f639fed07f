// Language, colours, search, menu. Loaded in <head>: the language is set before anything is drawn.
(() => {
  const root = document.documentElement, up = document.currentScript.dataset.up;
  const kept = {
    get(key) { try { return localStorage.getItem(`bagu.${key}`); } catch { return null; } },
    set(key, value) { try { localStorage.setItem(`bagu.${key}`, value); } catch { /* private windows keep nothing */ } },
  };
  const system = navigator.language.startsWith("zh") ? "zh" : "en";

  function speak(language) {
    root.lang = language;
    root.dataset.lang = language;
    document.title = `${root.dataset[language === "zh" ? "titleZh" : "titleEn"]} · 八股 bagu`;
  }
  function paint(theme) {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
  }
  speak(kept.get("language") ?? system);
  paint(kept.get("theme"));

  let index = null;
  function load() {  // a script tag: fetch does not read file://
    index ??= new Promise((done) => {
      const script = document.createElement("script");
      script.src = `${up}index.js`;
      script.onload = () => done(window.BOOK.map(([path, en, zh, kindEn, kindZh, text]) =>
        ({ path, en, zh, kindEn, kindZh, text, low: text.toLowerCase(), title: `${en} ${zh} ${path}`.toLowerCase() })));
      document.head.append(script);
    });
    return index;
  }
  // Every word must occur somewhere: substrings need no segmentation of 中文. Titles count most.
  function found(pages, query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    const score = (page) => words.reduce((sum, word) => {
      const times = page.low.split(word).length - 1, inTitle = page.title.includes(word);
      return times || inTitle ? sum + Math.min(times, 9) + (inTitle ? 40 : 0) + (page.kindEn === "lab" ? 3 : 0) : NaN;
    }, 0);
    return pages.map((page) => [score(page), page]).filter(([s]) => s > 0).sort((a, b) => b[0] - a[0]).slice(0, 12)
      .map(([, page]) => [page, words]);
  }
  function snippet(page, words) {
    const at = Math.max(0, page.low.indexOf(words[0]) - 40), out = document.createElement("p");
    const text = (at ? "…" : "") + page.text.slice(at, at + 130) + "…", low = text.toLowerCase();
    let from = 0;
    for (let hit = low.indexOf(words[0]); hit >= 0; hit = low.indexOf(words[0], from)) {
      const mark = document.createElement("mark");
      mark.textContent = text.slice(hit, hit + words[0].length);
      out.append(text.slice(from, hit), mark);
      from = hit + words[0].length;
    }
    out.append(text.slice(from));
    return out;
  }

  document.addEventListener("DOMContentLoaded", () => {
    const by = (id) => document.getElementById(id), input = by("search"), hits = by("hits");
    by("language").onclick = () => {
      const next = root.lang === "zh" ? "en" : "zh";
      kept.set("language", next);
      speak(next);
    };
    by("theme").onclick = () => {
      const dark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
      paint(dark ? "light" : "dark");
      kept.set("theme", root.dataset.theme);
    };
    by("menu").onclick = () => {
      by("menu").setAttribute("aria-expanded", String(document.body.classList.toggle("menu")));
    };
    const all = by("unfold");
    if (all) all.onclick = () => document.querySelectorAll("details.question").forEach((d) => { d.open = true; });
    const here = document.querySelector(".side [aria-current]");
    if (here) by("side").scrollTop = here.offsetTop - 200;

    let last = 0;
    input.onfocus = load;
    input.oninput = async () => {
      const turn = ++last, query = input.value.trim(), pages = query ? found(await load(), query) : [];
      if (turn !== last) return;
      hits.hidden = !query;
      hits.replaceChildren(...pages.map(([page, words]) => {
        const item = document.createElement("li"), link = document.createElement("a"), title = document.createElement("b");
        link.href = up + page.path;
        title.textContent = root.lang === "zh" ? page.zh : page.en;
        const kind = document.createElement("small");
        kind.textContent = root.lang === "zh" ? page.kindZh : page.kindEn;
        link.append(title, " ", kind, snippet(page, words));
        item.append(link);
        return item;
      }));
      if (query && !pages.length) hits.textContent = root.lang === "zh" ? "没有找到" : "nothing found";
    };
    document.addEventListener("keydown", (event) => {
      const links = [...hits.querySelectorAll("a")], at = links.indexOf(document.activeElement);
      if (event.key === "/" && document.activeElement !== input) { event.preventDefault(); input.focus(); }
      else if (event.key === "Escape") { hits.hidden = true; input.blur(); }
      else if (event.key === "Enter" && document.activeElement === input && links[0]) links[0].click();
      else if (event.key === "ArrowDown" && (at >= 0 || document.activeElement === input)) { event.preventDefault(); links[at + 1]?.focus(); }
      else if (event.key === "ArrowUp" && at >= 0) { event.preventDefault(); (links[at - 1] ?? input).focus(); }
    });
    document.addEventListener("click", (event) => {
      if (!event.target.closest(".search")) hits.hidden = true;
    });
  });
  window.addEventListener("beforeprint", () => document.querySelectorAll("details.question").forEach((d) => { d.open = true; }));
})();
