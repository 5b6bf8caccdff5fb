"use strict";
// The catalog, the filters of the findings, and the choice of a recorded run. No network: data comes with the page.
const FIELDS = ["name", "op", "state", "dtypes", "gpus", "models", "more", "family", "title"];
const SHOWN = 60;

function rows() {
  const columns = CATALOG.rows.columns;
  return columns[0].rows.map((_, row) => {
    const one = {};
    FIELDS.forEach((field, n) => { one[field] = columns[n].values[columns[n].rows[row]]; });
    return one;
  });
}

function sizes(one, kind) {
  const found = new Set();
  for (const list of Object.values(one.models))
    for (const size of list) if (size.startsWith(kind + ":")) found.add(size.slice(kind.length + 1));
  return found;
}

// A model and its parallel sizes belong together; a Definition without sizes serves every size of the model.
function fitsModel(one, wanted) {
  const names = Object.keys(one.models).filter((name) => wanted.models.every((part) => name === part));
  if (wanted.models.length && !names.length) return false;
  const needed = ["tp", "ep"].filter((kind) => wanted[kind]);
  if (!needed.length) return true;
  const candidates = wanted.models.length ? names : Object.keys(one.models);
  return candidates.some((name) => needed.every((kind) => {
    const own = one.models[name].filter((size) => size.startsWith(kind + ":"));
    return !one.models[name].length || own.includes(`${kind}:${wanted[kind]}`);
  }));
}

function query(text, every) {
  const wanted = { words: [], models: [], tp: "", ep: "" };
  const models = new Set(every.flatMap((one) => Object.keys(one.models)));
  const plain = text.toLowerCase().replace(/\b(tp|ep)\s*[=:]?\s*(\d+)\b/g, (_, kind, size) => { wanted[kind] = size; return " "; });
  for (const word of plain.split(/\s+/).filter(Boolean)) {
    if (models.has(word)) wanted.models.push(word);
    else wanted.words.push(word.replace(/,(?=\d{3})/g, ""));
  }
  return wanted;
}

function start() {
  const page = document.getElementById("lookup");
  if (!page) return;
  const every = rows();
  for (const one of every) {
    const op = CATALOG.ops[one.op];
    one.text = [one.name, one.name.replace(/_/g, " "), one.name.replace(/_/g, "-"), one.family, one.op, op, one.title, ...one.more,
      ...one.dtypes, ...one.gpus, ...Object.keys(one.models)].join(" ").toLowerCase();
    one.text += one.text.includes("fp8") || one.text.includes("float8") ? " fp8" : "";
  }
  const choices = {
    op: [...new Set(every.map((one) => one.op))], model: [...new Set(every.flatMap((one) => Object.keys(one.models)))],
    tp: [...new Set(every.flatMap((one) => [...sizes(one, "tp")]))], ep: [...new Set(every.flatMap((one) => [...sizes(one, "ep")]))],
    dtype: [...new Set(every.flatMap((one) => one.dtypes))], gpu: [...new Set(every.flatMap((one) => one.gpus))],
    state: [...new Set(every.map((one) => one.state))],
  };
  const titles = { op: "Op", model: "Model", tp: "TP", ep: "EP", dtype: "dtype", gpu: "GPU", state: "State" };
  const box = page.querySelector(".filters");
  const text = document.getElementById("q");
  const selects = {};
  for (const [key, values] of Object.entries(choices)) {
    const label = document.createElement("label");
    const select = document.createElement("select");
    select.id = key;
    label.append(titles[key], select);
    const order = ["tp", "ep"].includes(key) ? (a, b) => a - b : undefined;
    select.append(new Option("any", ""), ...values.sort(order).map((value) => new Option(key === "op" ? CATALOG.ops[value] : value, value)));
    selects[key] = select;
    box.append(label);
  }
  const list = document.getElementById("found");
  const status = document.getElementById("count");
  const more = document.getElementById("more");
  let limit = SHOWN;

  function show() {
    const chosen = Object.fromEntries(Object.entries(selects).map(([key, select]) => [key, select.value]));
    const wanted = query(text.value, every);
    if (chosen.model) wanted.models.push(chosen.model);
    wanted.tp = chosen.tp || wanted.tp;
    wanted.ep = chosen.ep || wanted.ep;
    const found = every.filter((one) => (!chosen.op || one.op === chosen.op) && (!chosen.state || one.state === chosen.state)
      && (!chosen.dtype || one.dtypes.includes(chosen.dtype)) && (!chosen.gpu || one.gpus.includes(chosen.gpu))
      && fitsModel(one, wanted) && wanted.words.every((word) => one.text.includes(word)));
    list.replaceChildren(...found.slice(0, limit).map((one) => {
      const item = document.createElement("li");
      const anchor = document.createElement("a");
      anchor.href = `definitions/${one.name}.html`;
      anchor.textContent = one.name;
      const state = document.createElement("span");
      state.className = `state ${one.state}`;
      state.textContent = one.state;
      const note = document.createElement("small");
      note.textContent = `${one.title}. ${one.gpus.join(", ")}`;
      item.append(anchor, " ", state, note);
      return item;
    }));
    status.textContent = found.length === 1 ? "1 Definition" : `${found.length} Definitions`;
    more.hidden = found.length <= limit;
    const kept = new URLSearchParams(Object.entries({ q: text.value, ...chosen }).filter(([, value]) => value));
    const address = kept.toString() ? `#${kept}` : location.pathname;
    if (location.hash !== `#${kept}`) history.replaceState(null, "", kept.toString() ? address : location.href.split("#")[0]);
  }
  function read() {
    const given = new URLSearchParams(location.hash.slice(1));
    text.value = given.get("q") || "";
    for (const [key, select] of Object.entries(selects)) select.value = given.get(key) || "";
    show();
  }
  for (const kind of ["input", "change"]) page.addEventListener(kind, () => { limit = SHOWN; show(); });
  more.addEventListener("click", () => { limit += 200; show(); });
  window.addEventListener("hashchange", read);
  read();
}

function filters() {
  for (const box of document.querySelectorAll("[data-filter]")) {
    const sections = [...document.querySelectorAll(`.${box.dataset.filter}`)];
    const count = document.createElement("p");
    count.setAttribute("role", "status");
    const selects = ["library", "version", "state"].map((key) => {
      const label = document.createElement("label");
      const select = document.createElement("select");
      select.id = `filter-${key}`;
      label.append(key[0].toUpperCase() + key.slice(1), select);
      const values = [...new Set(sections.flatMap((one) => one.dataset[key].split(" ")))].sort();
      select.append(new Option("any", ""), ...values.map((value) => new Option(value, value)));
      box.append(label);
      return [key, select];
    });
    const show = () => {
      let shown = 0;
      for (const one of sections) {
        one.hidden = !selects.every(([key, select]) => !select.value || one.dataset[key].split(" ").includes(select.value));
        shown += !one.hidden;
      }
      count.textContent = `${shown} of ${sections.length} findings`;
    };
    for (const kind of ["input", "change"]) box.addEventListener(kind, show);
    box.after(count);
    show();
  }
}

for (const select of document.querySelectorAll("select.go"))
  select.addEventListener("change", () => { location.href = select.value; });
for (const form of document.querySelectorAll("form.search-home"))
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    location.href = `catalog.html#${new URLSearchParams({ q: form.elements.q.value })}`;
  });
start();
filters();
