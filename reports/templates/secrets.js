"use strict";
// The list of secrets: search, filter, sort, page through, open one. All text goes in as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("secrets-data").textContent);
  const PER_PAGE = 25, n = data.ids.length, steps = data.codes.length - 1;
  const probabilities = new Map([...data.codes].map((c, i) => [c, (1 - i / steps) ** data.power]));
  const rank = (text) => ".-0123".indexOf(text);

  const el = (tag, props = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(props)) {
      // `className` and `htmlFor` are properties alone, `aria-label` is an attribute alone.
      if (name in node) node[name] = value; else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  };
  const rowTitle = (row) => row.target + (row.setting === "white-box" ? ", white-box" : "");
  const dash = "–";
  const counted = (number) => number.toLocaleString("en-US");
  const percent = (p) => p > 0.995 ? "100%" : p >= 0.01 ? `${Math.round(100 * p)}%` : p > 0 ? "<1%" : "0%";
  const chance = (bits) => {  // of a whole suffix
    if (bits === null || bits === undefined) return dash;
    // 6.6 bits are 1 in 97: from there on percent would round to 1 or less.
    if (bits < 6.6) return percent(2 ** -bits);
    const oneIn = 2 ** bits;
    return "1 in " + (bits < 40 ? counted(+oneIn.toPrecision(2)) : oneIn.toExponential(0).replace("e+", "e"));
  };
  const score = (value) => value === null || value === undefined ? dash : String(value).replace("-", "−");

  // --- what there is to see: one record a secret and row, as row * n + secret ---

  const records = [];
  data.rows.forEach((row, r) => { for (let i = 0; i < n; i++) if (row.outcome[i] !== "-") records.push(r * n + i); });
  const at = (record) => [data.rows[Math.floor(record / n)], record % n];
  // sort: what a column is sorted by; down: whether the first click puts the largest on top
  const columns = [
    { name: "Secret", sort: (row, i) => i, show: (row, i) => data.ids[i] },
    { name: "Outcome", down: true, sort: (row, i) => rank(row.outcome[i]), show: (row, i) => data.outcomes[row.outcome[i]] },
    { name: "Tokens right", number: true, down: true, sort: (row, i) => row.lead[i] ?? -1,
      show: (row, i) => row.lead[i] == null ? dash : data.lengths[i] ? `${row.lead[i]}/${data.lengths[i]}` : row.lead[i] },
    { name: "Token by token", tokens: true },
    { name: "Whole suffix", number: true, tokens: true, down: true, sort: (row, i) => -(bits(row, i) ?? Infinity), show: (row, i) => chance(bits(row, i)) },
    { name: "Copies", number: true, down: true, sort: (row, i) => data.repeats[i] ?? -1, show: (row, i) => data.repeats[i] ?? dash },
    { name: "Group", group: true, sort: (row, i) => data.group[i] ?? Infinity, show: (row, i) => data.groups[data.group[i]] ?? dash },
    { name: "Member", down: true, sort: (row, i) => +data.members[i], show: (row, i) => data.members[i] === "1" ? "yes" : "no" },
    { name: "Score", number: true, down: true, sort: (row, i) => row.score[i] ?? -Infinity, show: (row, i) => score(row.score[i]) },
    { name: "Target", same: "target", sort: (row) => data.rows.indexOf(row), show: rowTitle },
    { name: "Attack", same: "attack", sort: (row) => row.attack, show: (row) => row.attack },
  ].filter((c) => !(c.tokens && !data.tokens.length) && !(c.group && !data.groups.length));
  const distribution = (row) => data.tokens.find((t) => t.target === row.target);
  const bits = (row, i) => distribution(row)?.bits[i];

  // --- filters ---

  const distinct = (values) => [...new Set(values)];
  const first = data.rows[data.first];
  const filters = [
    { id: "outcome", name: "Outcome", options: Object.keys(data.outcomes).filter((o) => data.rows.some((r) => r.outcome.includes(o))),
      label: (o) => data.outcomes[o], test: (o) => (row, i) => row.outcome[i] === o },
    { id: "repeats", name: "Copies", options: distinct(data.repeats).filter((r) => r !== null).sort((a, b) => a - b).map(String),
      test: (o) => (row, i) => String(data.repeats[i]) === o },
    { id: "group", name: "Group", options: data.groups.map((_, g) => String(g)), label: (g) => data.groups[g],
      test: (o) => (row, i) => String(data.group[i]) === o },
    { id: "member", name: "Member", options: distinct(data.members).sort().reverse(), label: (o) => o === "1" ? "yes" : "no",
      test: (o) => (row, i) => data.members[i] === o },
    { id: "target", name: "Target", options: distinct(data.rows.map(rowTitle)), start: rowTitle(first), test: (o) => (row) => rowTitle(row) === o },
    { id: "attack", name: "Attack", options: distinct(data.rows.map((r) => r.attack)), start: first.attack, test: (o) => (row) => row.attack === o },
  ].filter((f) => f.options.length > 1);

  const search = el("input", { type: "search", id: "filter-search", autocomplete: "off", spellcheck: false });
  const bar = el("div", { className: "filters", role: "search", "aria-label": "Filter the secrets" },
    el("label", { htmlFor: search.id }, el("span", {}, "Secret id"), search));
  for (const f of filters) {
    f.select = el("select", { id: `filter-${f.id}` }, el("option", { value: "" }, "all"),
      ...f.options.map((o) => el("option", { value: o }, f.label ? f.label(o) : o)));
    f.select.value = f.start ?? "";
    f.select.addEventListener("change", () => show(0));
    bar.append(el("label", { htmlFor: f.select.id }, el("span", {}, f.name), f.select));
  }
  const reset = el("button", { type: "button", id: "filter-reset" }, "Show all");
  reset.addEventListener("click", () => { search.value = ""; filters.forEach((f) => { f.select.value = ""; }); show(0); });
  bar.append(reset);
  search.addEventListener("input", () => show(0));

  // --- the table ---

  const status = el("p", { id: "secrets-status", className: "note", role: "status" });
  const body = el("tbody");
  const heads = columns.map((column) => {
    if (!column.sort) return el("th", { scope: "col" }, column.name);
    const button = el("button", { type: "button" }, column.name);
    button.addEventListener("click", () => { order = { column, down: order.column === column ? !order.down : !!column.down }; show(0); });
    return el("th", { scope: "col", className: column.number ? "number" : "" }, button);
  });
  const table = el("table", { id: "secrets-table" },
    el("caption", { id: "secrets-caption" }, el("span", {}, "Secrets by target and attack; a secret's id opens it")),
    el("thead", {}, el("tr", {}, ...heads)), body);
  const region = el("div", { className: "scroll", role: "region", tabIndex: 0 }, table);
  region.setAttribute("aria-labelledby", "secrets-caption");
  const turn = (name, by) => {
    const button = el("button", { type: "button", id: `secrets-${name.toLowerCase()}` }, name);
    button.addEventListener("click", () => show(page + by));
    return button;
  };
  const [back, on] = [turn("Previous", -1), turn("Next", 1)];
  let order = { column: columns[1], down: true }, page = 0, found = [];

  function show(wanted) {
    const words = search.value.trim().toLowerCase();
    const tests = filters.filter((f) => f.select.value).map((f) => f.test(f.select.value));
    found = records.filter((record) => {
      const [row, i] = at(record);
      return (!words || data.ids[i].toLowerCase().includes(words)) && tests.every((test) => test(row, i));
    });
    const key = new Map(found.map((record) => [record, order.column.sort(...at(record))]));
    const sign = order.down ? -1 : 1;
    // Compared and not subtracted: two infinities would give NaN. Of equals the order of the data stays.
    found.sort((a, b) => { const [x, y] = [key.get(a), key.get(b)]; return sign * (x < y ? -1 : x > y ? 1 : 0) || a - b; });
    const last = Math.max(0, Math.ceil(found.length / PER_PAGE) - 1);
    page = Math.min(Math.max(0, wanted), last);
    const from = page * PER_PAGE, shown = found.slice(from, from + PER_PAGE);
    body.replaceChildren(...shown.map(line));
    status.textContent = found.length
      ? `${counted(from + 1)}–${counted(from + shown.length)} of ${counted(found.length)}` : "Nothing matches these filters.";
    back.disabled = page === 0;
    on.disabled = page === last;
    const same = filters.filter((f) => f.select.value).map((f) => f.id);  // a column that says one thing says nothing
    columns.forEach((column, c) => {
      const hidden = same.includes(column.same);
      for (const tr of [heads[c].parentNode, ...body.rows]) tr.cells[c].hidden = hidden;
    });
    heads.forEach((head, c) => {
      if (columns[c] === order.column) head.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }

  function line(record) {
    const [row, i] = at(record);
    return el("tr", {}, ...columns.map((column, c) => {
      if (c === 0) return el("th", { scope: "row" }, opener(i));
      if (!column.show) return el("td", {}, spark(distribution(row)?.codes[i]));
      const kind = column.name === "Outcome" ? `outcome outcome-${row.outcome[i]}` : column.number ? "number" : "";
      return el("td", { className: kind }, column.show(row, i));
    }));
  }

  function spark(codes) {
    if (!codes) return el("span", {}, dash);
    // Cloned: `createElement` makes elements of HTML, which draw nothing in an SVG.
    const svg = document.getElementById("secrets-spark").content.firstElementChild.cloneNode(true);
    const values = [...codes].map((c) => probabilities.get(c));
    svg.firstElementChild.setAttribute("d", values.map((p, t) => `M${t} 10V${(10 - Math.max(0.4, 10 * p)).toFixed(1)}h.75V10z`).join(""));
    svg.setAttribute("viewBox", `0 0 ${values.length} 10`);
    svg.setAttribute("aria-label", `${values.filter((p) => p >= 0.5).length} of ${values.length} tokens at least 50% likely`);
    svg.style.width = `${Math.min(14, Math.max(4, values.length * 0.3))}rem`;
    return svg;
  }

  // --- one secret ---

  function opener(i) {
    const button = el("button", { type: "button", className: "opener", "aria-expanded": "false" }, data.ids[i]);
    button.addEventListener("click", () => {
      const row = button.closest("tr"), open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      if (open) row.nextElementSibling.remove();
      else row.after(el("tr", { className: "opened" }, el("td", { colSpan: columns.length }, inside(i))));
    });
    return button;
  }

  function inside(i) {
    const parts = [];
    const known = data.tokens.filter((t) => t.codes[i]);
    if (known.length) parts.push(tokenTable(i, known));
    const seen = data.rows.filter((row) => row.outcome[i] !== "-");
    parts.push(el("table", {}, el("caption", {}, "What each configuration extracts of it"),
      el("thead", {}, el("tr", {}, ...["Target", "Attack", "Outcome", "Score"].map((h) => el("th", { scope: "col", className: h === "Score" ? "number" : "" }, h)))),
      el("tbody", {}, ...seen.map((row) => el("tr", {}, el("th", { scope: "row" }, rowTitle(row)), el("td", {}, row.attack),
        el("td", {}, data.outcomes[row.outcome[i]]), el("td", { className: "number" }, score(row.score[i])))))));
    return el("div", { className: "inside" }, ...parts);
  }

  function tokenTable(i, known) {
    const texts = data.texts?.[i] ?? [];
    const positions = [...known[0].codes[i]].map((_, t) => t);
    const head = el("tr", {}, el("th", { scope: "col" }, "Token"),
      ...positions.map((t) => el("th", { scope: "col" }, texts[t] ?? String(t + 1))));
    const lines = known.map((t) => el("tr", {}, el("th", { scope: "row" }, t.target, el("br"), `all: ${chance(t.bits[i])}`),
      ...[...t.codes[i]].map((c) => {
        const p = probabilities.get(c), level = el("i", { "aria-hidden": "true" });
        level.style.height = `${Math.max(2, 100 * p)}%`;
        return el("td", {}, el("span", { className: "level" }, level), percent(p));
      })));
    return el("div", { className: "tokens", role: "region", tabIndex: 0, "aria-label": `Tokens of ${data.ids[i]}` }, el("table", {},
      el("caption", {}, "Probability of each true token, given all before it"), el("thead", {}, head), el("tbody", {}, ...lines)));
  }

  document.getElementById("secrets-without").remove();
  document.getElementById("secrets-list").append(bar, status, region, el("div", { className: "turn" }, back, on));
  show(0);
})();
