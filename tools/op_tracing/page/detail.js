"use strict";
// The panel of one op: its call sites, its kernels, and the chains of each kernel once the kernel is opened.

/** The number of chains shown at once; a button shows more. */
const CHAINS = 5;
/** The number of call sites, and of Definitions of a closed kernel, that are always shown. */
const FEW = 4;

/**
 * Shows a subject: {kicker, title, note, sites, others, kernels, empty}. `sites` are the call sites of the chosen place,
 * `others` the remaining ones of the same op; the chains through any of them come first. A kernel's condition is null if
 * the trace gives none.
 */
class Detail {
  constructor(section, article, leave) {
    this.section = section;
    this.article = article;
    this.nothing = document.getElementById("nothing");
    this.leave = leave;
    this.words = [];
    section.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !article.hidden) leave();
    });
  }

  clear() {
    this.article.hidden = true;
    this.article.replaceChildren();
    this.nothing.hidden = false;
  }

  show(subject) {
    const close = element("button", { type: "button", class: "close", "aria-label": "Close the details" }, "Close");
    close.addEventListener("click", () => this.leave());
    this.heading = element("h2", { tabindex: "-1" }, subject.title);
    this.names = [];
    this.article.replaceChildren(
      element("div", { class: "top" }, element("p", { class: "kicker" }, subject.kicker), close),
      this.heading,
      ...(subject.note ? [element("p", { class: "condition" }, subject.note)] : []),
      ...this.sites(subject),
      ...this.kernels(subject),
    );
    this.nothing.hidden = true;
    this.article.hidden = false;
    this.section.scrollTop = 0;
    this.highlight(this.words);
  }

  focus() {
    this.heading.focus();
  }

  /** Marks the search words in the names of kernels. */
  highlight(words) {
    this.words = words;
    if (!this.article.hidden) for (const [part, text] of this.names) mark(part, text, words);
  }

  sites(subject) {
    const list = (sites) => element("ul", { class: "sites" }, ...sites.map((site) => this.site(site)));
    const parts = [element("h3", {}, subject.sites.length === 1 ? "Call site" : "Call sites"), list(subject.sites)];
    if (subject.others.length) {
      parts.push(element("details", { class: "others" },
        element("summary", {}, `${plural(subject.others.length, "other call site")} of ${subject.title}`), list(subject.others)));
    }
    return parts;
  }

  site(site) {
    return element("li", {},
      element("span", { class: "place" }, ...breakable(`${site.file}:${site.line}`)), " ",
      element("span", { class: "where" }, ...breakable(site.where)),
      site.annotation ? element("span", { class: "condition" }, site.annotation) : "");
  }

  kernels(subject) {
    if (!subject.kernels.length) return [element("p", { class: "empty" }, subject.empty)];
    const covered = subject.kernels.filter((kernel) => kernel.definitions.length).length;
    const through = new Set([...subject.sites, ...subject.others].map((site) => site.key));
    const cards = subject.kernels.map((kernel, number) => this.kernel(kernel, number, through, subject.title));
    if (cards.length === 1) cards[0].open();
    return [
      element("h3", {}, subject.kernels.length === 1 ? "Kernel" : `${subject.kernels.length} kernels`,
        subject.kernels.length === 1 ? "" : element("span", { class: "note" }, covered ? `${covered} with a Definition` : "none with a Definition yet")),
      element("ul", { class: "kernels" }, ...cards.map((card) => card.element)),
    ];
  }

  kernel(kernel, number, through, title) {
    const name = element("span", { class: "name" }, kernel.name);
    this.names.push([name, kernel.name]);
    const more = element("div", { class: "more", id: `kernel-${number}`, hidden: "" });
    const button = element("button", { type: "button", "aria-expanded": "false", "aria-controls": more.id },
      element("span", { class: "twisty", "aria-hidden": "true" }), name);
    const brief = element("div", { class: "brief" });
    const card = element("li", { class: "kernel" },
      element("h4", {}, button, " ", element("span", { class: "source" }, kernel.source)), brief, more);
    const toggle = () => {
      const open = more.hidden;
      if (open && !more.hasChildNodes()) more.append(...this.more(kernel, through, title));
      more.hidden = !open;
      button.setAttribute("aria-expanded", String(open));
      brief.replaceChildren(...this.brief(kernel, open));
    };
    brief.append(...this.brief(kernel, false));
    button.addEventListener("click", toggle);
    return { element: card, open: toggle };
  }

  /** Condition and Definitions, in full or shortened. */
  brief(kernel, whole) {
    const conditions = kernel.condition === null ? [] : kernel.condition.split("; or ");
    const names = kernel.definitions;
    const parts = [];
    if (kernel.condition === "") parts.push(element("p", { class: "always" }, "Always possible"));
    else if (conditions.length) {
      const rest = conditions.length - 1;
      parts.push(element("ul", { class: whole ? "alternatives" : "alternatives short" },
        ...conditions.slice(0, whole ? undefined : 1).map((text, number) =>
          element("li", {}, number ? element("span", { class: "or" }, "or ") : "",
            /^\d+ more$/.test(text) ? element("span", { class: "or" }, text) : text))));
      if (rest && !whole) parts.push(element("p", { class: "rest" }, `or ${plural(rest, "other condition")}`));
    }
    parts.push(element("p", { class: names.length ? "definitions" : "definitions none" },
      element("span", { class: "key" }, names.length === 1 ? "Definition: " : "Definitions: "),
      ...(names.length ? [] : ["none yet"]),
      ...names.slice(0, whole ? undefined : FEW).flatMap((name) => [element("code", {}, ...breakable(name)), " "]),
      !whole && names.length > FEW ? `and ${names.length - FEW} more` : ""));
    return parts;
  }

  more(kernel, through, title) {
    const chains = kernel.chains();
    const passing = chains.filter((chain) => chain.some((frame) => through.has(frame.key)));
    const others = chains.filter((chain) => !passing.includes(chain));
    const defined = kernel.file ? `${kernel.file}:${kernel.line}` : "no Python definition in these sources";
    const parts = [
      element("p", { class: "defined" }, element("span", { class: "key" }, "Defined at "),
        element("span", { class: "place" }, ...breakable(defined))),
      element("h5", {}, passing.length ? `${plural(passing.length, "call chain")} through ${title}` : `No chain in the trace passes through ${title}`),
      this.chains(passing, through),
    ];
    if (others.length) {
      const list = element("div", {});
      const rest = element("details", { class: "others" },
        element("summary", {}, `${plural(others.length, passing.length ? "other call chain" : "call chain")} of this kernel`), list);
      rest.addEventListener("toggle", () => {
        if (rest.open && !list.hasChildNodes()) list.append(this.chains(others, through));
      });
      parts.push(rest);
    }
    return parts;
  }

  /** Call chains, a few at a time. */
  chains(chains, through) {
    const box = element("div", { class: "chains" });
    let shown = 0;
    const button = element("button", { type: "button", class: "next" });
    const next = () => {
      const first = chains.slice(shown, shown + CHAINS).map((chain, number) => this.chain(chain, shown + number, chains.length, through));
      button.before(...first);
      shown += first.length;
      button.hidden = shown >= chains.length;
      button.textContent = `Show ${Math.min(CHAINS, chains.length - shown)} more of ${chains.length}`;
      return first[0];
    };
    box.append(button);
    next();
    button.addEventListener("click", () => {
      const first = next();
      first.focus();
    });
    return box;
  }

  chain(frames, number, count, through) {
    return element("ol", { class: "chain", start: "0", tabindex: "-1", "aria-label": `Call chain ${number + 1} of ${count}` },
      ...frames.map((frame) => element("li", { class: through.has(frame.key) ? "frame here" : "frame" },
        element("code", { class: "call" }, frame.call),
        element("span", { class: "at" }, element("span", { class: "place" }, ...breakable(`${frame.file}:${frame.line}`)), " ",
          element("span", { class: "where" }, ...breakable(frame.where))),
        frame.annotation ? element("span", { class: "condition" }, frame.annotation) : "")));
  }
}
