"use strict";
// Assembles the page: header, tabs, search, the trees, the panel, and the part of the address after #.

const byId = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 56rem)");

// --- content of the trees ------------------------------------------------------------------------------------------

/** A node of the graph, or an op outside the graph, as an item of a tree. */
function makeItem(kind, name, { annotation = "", where = "", note = "", sites = [], kernels = [], children = [], key = "" }) {
  const annotated = sites.filter((site) => site.annotation);
  const plain = sites.filter((site) => !site.annotation);
  const texts = [["name", name], ["note", note], ["where", where], ["condition", annotation]];
  for (const site of annotated) texts.push(["place", places([site])], ["condition case", site.annotation]);
  return { kind, name, key, texts, aside: places(plain), kernels: kernels.map((kernel) => kernel.name), children };
}

function graphItem(node) {
  const children = node.children.map(graphItem);
  const common = { annotation: node.annotation, where: node.function, children };
  if (node.kind === "op") {
    const op = trace.ops.get(node.name);
    const made = makeItem("op", `${node.name}()`, {
      ...common, sites: node.sites, kernels: op.kernels, note: plural(op.kernels.length, "kernel"), key: `op/${node.name}`,
    });
    return { ...made, subject: opSubject("Op in the forward", op, node.sites, node.annotation) };
  }
  if (node.kind === "torch") {
    const made = makeItem("torch", `${node.name}()`, { ...common, sites: node.sites, note: "plain torch", key: `torch/${node.name}` });
    return { ...made, subject: {
      kicker: "Plain torch", title: made.name, note: node.annotation, sites: node.sites, others: [], kernels: [],
      empty: "PyTorch computes this; no traced kernel is called.",
    } };
  }
  return makeItem(node.kind, node.sites.length ? `${node.name}()` : node.name, { ...common, sites: node.sites });
}

function opSubject(kicker, op, sites, note) {
  const here = new Set(sites.map((site) => site.key));
  const others = op.sites.filter((site) => !here.has(site.key));
  return { kicker, title: `${op.name}()`, note, sites, others, kernels: op.kernels, empty: "" };
}

function outsideItems() {
  const groups = new Map();
  for (const op of trace.outside) groups.set(op.group, [...(groups.get(op.group) ?? []), op]);
  return [...groups].map(([group, ops]) => makeItem("group", group, {
    note: plural(ops.length, "op"),
    children: ops.map((op) => ({
      ...makeItem("op", `${op.name}()`, {
        annotation: op.when, note: plural(op.kernels.length, "kernel"), sites: op.sites, kernels: op.kernels, key: `outside/${op.name}`,
      }),
      subject: { ...opSubject(`Outside the forward: ${group}`, op, op.sites, ""), note: op.when },
    })),
  }));
}

function directItems() {
  return trace.direct.map(({ kernel, sites }) => ({
    ...makeItem("op", kernel.name, { note: kernel.source, sites, key: `kernel/${kernel.source}/${kernel.name}` }),
    subject: {
      kicker: "Called by the model’s code", title: kernel.name, note: "", sites, others: [], empty: "",
      kernels: [{ ...kernel, condition: null }],
    },
  }));
}

// --- the header ----------------------------------------------------------------------------------------------------

function header() {
  const covered = trace.kernels.filter((kernel) => kernel.definitions.length).length;
  byId("model").append(trace.model, " ", element("span", { class: "platform" }, trace.platform));
  byId("summary").append(
    `${plural(trace.ops.size, "op")} in the forward, ${trace.outside.length} outside it; `
    + `${plural(trace.kernels.length, "kernel")}, ${covered} with a Definition`);
  const sources = Object.entries(trace.sources);
  byId("versions").append(...sources.map(([name, { version }]) => element("span", {}, `${name} ${version}`)));
  byId("hashes").append(
    element("p", {}, "Made by static analysis of these sources, listed with the SHA-256 of their Python files."),
    element("dl", {}, ...sources.flatMap(([name, { version, sha256 }]) => [
      element("dt", {}, `${name} ${version}`), element("dd", {}, sha256)])),
    trace.unresolved
      ? element("p", {}, `${plural(trace.unresolved, "expression")} could not be evaluated: kernels that depend on them may be missing.`)
      : "");
}

// --- the page ------------------------------------------------------------------------------------------------------

const detail = new Detail(byId("detail"), byId("subject"), leave);
const trees = {
  graph: new Tree(byId("tree-graph"), trace.graph.children.map(graphItem), choose),
  outside: new Tree(byId("tree-outside"), outsideItems(), choose),
  direct: new Tree(byId("tree-direct"), directItems(), choose),
};
let active = "graph";
let chosen = null;

function choose(item, enter) {
  if (item.subject) {
    const address = `#${encodeURI(item.key)}`;
    if (location.hash !== address) history.pushState(null, "", address);
    present(item, enter);
  } else trees[active].expand(item, !item.expanded);
}

function present(item, enter) {
  chosen = item;
  for (const tree of Object.values(trees)) tree.select(tree === trees[active] ? item : null);
  detail.show(item.subject);
  overlay(true);
  if (enter || narrow.matches) detail.focus();
}

function dismiss() {
  chosen = null;
  for (const tree of Object.values(trees)) tree.select(null);
  detail.clear();
  overlay(false);
}

/** Returns from the panel to the place where it was opened. */
function leave() {
  const item = chosen;
  const [name, tree] = Object.entries(trees).find(([, candidate]) => candidate.selected === item);
  dismiss();
  history.pushState(null, "", location.href.split("#")[0]);
  if (!item.shown) search("");
  show(name);
  tree.reveal(item);
  tree.focus(item);
}

/** On a narrow screen the panel covers the trees, which must then be unreachable. */
function overlay(covering) {
  document.body.classList.toggle("detailed", covering);
  byId("browse").inert = covering && narrow.matches;
}

// --- tabs ----------------------------------------------------------------------------------------------------------

function show(name) {
  active = name;
  for (const part of Object.keys(trees)) {
    byId(`tab-${part}`).setAttribute("aria-selected", String(part === name));
    byId(`tab-${part}`).setAttribute("tabindex", part === name ? "0" : "-1");
    byId(`panel-${part}`).hidden = part !== name;
  }
}

function tabs() {
  const names = Object.keys(trees);
  names.forEach((name, position) => {
    byId(`tab-${name}`).addEventListener("click", () => show(name));
    byId(`tab-${name}`).addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const edge = { Home: 0, End: names.length - 1 }[event.key];
      if (step === undefined && edge === undefined) return;
      event.preventDefault();
      const target = names[edge ?? (position + step + names.length) % names.length];
      show(target);
      byId(`tab-${target}`).focus();
    });
  });
  counts({ graph: trace.ops.size, outside: trace.outside.length, direct: trace.direct.length });
  show("graph");
}

function counts(numbers) {
  for (const [name, number] of Object.entries(numbers)) byId(`tab-${name}`).querySelector(".count").textContent = number;
}

// --- search --------------------------------------------------------------------------------------------------------

function search(text) {
  if (byId("search").value !== text) byId("search").value = text;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = Object.fromEntries(Object.entries(trees).map(([name, tree]) => [name, tree.filter(words)]));
  detail.highlight(words);
  document.body.classList.toggle("searching", words.length > 0);
  if (!words.length) {
    byId("status").textContent = "";
    counts({ graph: trace.ops.size, outside: trace.outside.length, direct: trace.direct.length });
    return;
  }
  counts(found);
  const total = found.graph + found.outside + found.direct;
  byId("status").textContent = total
    ? `${plural(found.graph, "match")} in the forward, ${found.outside} outside it, ${plural(found.direct, "direct kernel")}`
    : `Nothing matches “${text.trim()}”. The search covers the names of ops, kernels, functions and files.`;
}

function searching() {
  const input = byId("search");
  input.addEventListener("input", () => search(input.value));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      search("");
    } else if (event.key === "Enter" || event.key === "ArrowDown") {
      event.preventDefault();
      const tree = trees[active];
      const target = tree.firstMatch() ?? (input.value.trim() ? null : tree.current);
      if (target) tree.focus(target);
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.target === input || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "/" && !byId("browse").inert) {
      event.preventDefault();
      input.focus();
      input.select();
    } else if (event.key === "Escape" && input.value && byId("browse").contains(event.target)) {
      search("");
    }
  });
}

// --- the address ---------------------------------------------------------------------------------------------------

/** Opens the item that the address names. */
function follow() {
  let key = location.hash.slice(1);
  try {
    key = decodeURI(key);
  } catch {
    // A broken escape does not name an item.
  }
  if (!key) {
    dismiss();
    return;
  }
  if (chosen?.key === key) return;
  for (const [name, tree] of Object.entries(trees)) {
    const target = [...tree.walk()].find((item) => item.key === key);
    if (!target) continue;
    if (!target.shown) search("");
    show(name);
    tree.reveal(target);
    present(target, false);
    return;
  }
  dismiss();
  byId("status").textContent = `There is no “${key}” in this trace.`;
}

header();
tabs();
searching();
byId("expand").addEventListener("click", () => trees[active].expandAll(true));
byId("collapse").addEventListener("click", () => trees[active].expandAll(false));
for (const item of trees.graph.walk()) if (item.level <= 3) trees.graph.expand(item, true);
trees.outside.expandAll(true);
narrow.addEventListener("change", () => overlay(chosen !== null));
addEventListener("popstate", follow);
addEventListener("hashchange", follow);
follow();
