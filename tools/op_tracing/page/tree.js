"use strict";
// A tree of ops, with mouse and keyboard control (the tree pattern of WAI-ARIA) and a filter that keeps the path to each
// match.

/**
 * An item is {texts, children, ...}. `texts` are the elements in which matches are marked, each as [class, text], the
 * name first. `kernels` are names that are searched, but only shown if they match. Tree adds the rest.
 */
class Tree {
  constructor(root, items, choose) {
    this.root = root;
    this.items = items;
    this.choose = choose;
    this.words = [];
    this.byElement = new Map();
    this.build(items, root, null, 1);
    this.focusable(items[0]);
    if (!items.length) {
      root.hidden = true;
      root.after(element("p", { class: "empty" }, "None."));
    }
    root.addEventListener("click", (event) => this.click(event));
    root.addEventListener("keydown", (event) => this.key(event));
  }

  build(items, list, parent, level) {
    items.forEach((item, position) => {
      item.parent = parent;
      item.level = level;
      item.shown = true;
      item.expanded = false;
      item.label = element("span", { class: "label", id: `${this.root.id}-${this.byElement.size}` });
      item.marked = item.texts.filter(([, text]) => text).map(([style, text]) => {
        const part = element("span", { class: style });
        const write = style.startsWith("condition") ? (piece) => [piece] : breakable;
        mark(part, text, [], write);
        item.label.append(part, " ");
        return [part, text, write];
      });
      item.hits = element("span", { class: "hits", hidden: "" });
      item.label.append(item.hits);
      item.row = element("div", { class: "row" }, element("span", { class: "twisty", "aria-hidden": "true" }), item.label);
      const aside = element("span", { class: "aside", id: `${item.label.id}-at` }, ...breakable(item.aside));
      item.row.append(aside);
      item.element = element("li", {
        role: "treeitem", class: item.kind, tabindex: "-1", "aria-level": level, "aria-setsize": items.length,
        "aria-posinset": position + 1, "aria-labelledby": `${item.label.id} ${aside.id}`, "data-name": item.name,
      }, item.row);
      this.byElement.set(item.element, item);
      list.append(item.element);
      if (item.children.length) {
        item.element.setAttribute("aria-expanded", "false");
        item.group = element("ul", { role: "group", hidden: "" });
        item.element.append(item.group);
        this.build(item.children, item.group, item, level + 1);
      }
    });
  }

  /** All items, or those that are visible now, in order. */
  *walk(seen = false, items = this.items) {
    for (const item of items) {
      if (seen && !item.shown) continue;
      yield item;
      if (!seen || item.expanded) yield* this.walk(seen, item.children);
    }
  }

  expand(item, open) {
    if (!item.children.length) return;
    item.expanded = open;
    item.element.setAttribute("aria-expanded", String(open));
    item.group.hidden = !open;
    if (!open && item.element.contains(this.current.element)) this.focusable(item);
  }

  expandAll(open) {
    for (const item of this.walk()) this.expand(item, open);
  }

  /** Makes an item the one that the Tab key reaches. */
  focusable(item) {
    this.current?.element.setAttribute("tabindex", "-1");
    this.current = item;
    item?.element.setAttribute("tabindex", "0");
  }

  focus(item) {
    this.focusable(item);
    item.element.focus({ preventScroll: true });
    item.row.scrollIntoView({ block: "nearest" });
  }

  /** Opens the path to an item. */
  reveal(item) {
    for (let above = item.parent; above; above = above.parent) this.expand(above, true);
    this.focusable(item);
    item.row.scrollIntoView({ block: "center" });
  }

  select(item) {
    this.selected?.element.removeAttribute("aria-selected");
    this.selected = item;
    item?.element.setAttribute("aria-selected", "true");
  }

  /** Shows the items that match every word, and the paths to them; returns their number. Without words, shows all. */
  filter(words) {
    if (words.length && !this.words.length) {
      this.before = new Map([...this.walk()].map((item) => [item, item.expanded]));
    }
    this.words = words;
    const matches = this.items.reduce((sum, item) => sum + this.filterItem(item, words), 0);
    if (!words.length && this.before) {
      for (const [item, expanded] of this.before) this.expand(item, expanded);
      this.before = null;
      if (this.selected) this.reveal(this.selected);
    }
    const seen = [...this.walk(true)];
    if (!seen.includes(this.current)) this.focusable(seen[0] ?? this.current);
    return matches;
  }

  filterItem(item, words) {
    const below = item.children.reduce((sum, child) => sum + this.filterItem(child, words), 0);
    const kernels = words.length ? item.kernels.filter((name) => words.some((word) => name.toLowerCase().includes(word))) : [];
    const fields = [...item.texts.map(([, text]) => text), item.aside, ...item.kernels].map((text) => text.toLowerCase());
    item.matches = words.length > 0 && words.every((word) => fields.some((text) => text.includes(word)));
    item.shown = !words.length || item.matches || below > 0;
    if (words.length) this.expand(item, below > 0);
    // The children of a match stay available; the match is closed unless there are matches among them.
    if (item.matches && !below) for (const under of this.walk(false, item.children)) this.show(under, true);
    this.show(item, item.shown);
    item.element.classList.toggle("way", words.length > 0 && !item.matches);
    for (const [part, text, write] of item.marked) mark(part, text, item.matches ? words : [], write);
    item.hits.hidden = !(item.matches && kernels.length);
    if (!item.hits.hidden) {
      mark(item.hits, kernels.slice(0, 2).join(", ") + (kernels.length > 2 ? ` and ${kernels.length - 2} more` : ""), words);
    }
    return below + (item.matches ? 1 : 0);
  }

  show(item, shown) {
    item.shown = shown;
    item.element.hidden = !shown;
  }

  firstMatch() {
    return [...this.walk(true)].find((item) => item.matches);
  }

  click(event) {
    const item = this.byElement.get(event.target.closest("[role=treeitem]"));
    if (!item || !event.target.closest(".row") || String(getSelection())) return;
    this.focus(item);
    if (event.target.closest(".twisty")) this.expand(item, !item.expanded);
    else this.choose(item, false);
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const seen = [...this.walk(true)];
    const item = this.current;
    const position = seen.indexOf(item);
    const go = (target) => target && this.focus(target);
    const keys = {
      ArrowDown: () => go(seen[position + 1]),
      ArrowUp: () => go(seen[position - 1]),
      Home: () => go(seen[0]),
      End: () => go(seen[seen.length - 1]),
      ArrowRight: () => (item.expanded ? go(item.children.find((child) => child.shown)) : this.expand(item, true)),
      ArrowLeft: () => (item.expanded ? this.expand(item, false) : go(item.parent)),
      Enter: () => this.choose(item, true),
      " ": () => this.choose(item, false),
    };
    if (!Object.hasOwn(keys, event.key) || position < 0) return;
    event.preventDefault();
    keys[event.key]();
  }
}
