"use strict";
// Unpacks the data that page.py packed, in which texts, frames and the shared tails of chains are numbers.

const trace = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const FRAME = 5;
  const text = (number) => data.texts[number];

  const site = ([file, line, where, annotation]) => ({
    file: text(file), line, where: text(where), annotation: text(annotation), key: `${file}:${line}:${where}`,
  });

  const frame = (number) => {
    const [file, line, where, call, condition] = data.frames.slice(number * FRAME, (number + 1) * FRAME);
    return { ...site([file, line, where, condition]), call: text(call) };
  };

  /** The frames of a chain, the kernel's call first. */
  const chain = (link) => {
    const frames = [];
    for (; link >= 0; link = data.links[2 * link + 1]) frames.push(frame(data.links[2 * link]));
    return frames;
  };

  const kernels = data.kernels.map((kernel) => ({ ...kernel, chains: () => kernel.chains.map(chain) }));

  const op = (packed) => ({
    ...packed,
    sites: packed.sites.map(site),
    kernels: packed.kernels.map(([number, condition]) => ({ ...kernels[number], condition: text(condition) })),
  });

  const node = (packed) => ({ ...packed, sites: packed.sites.map(site), children: packed.children.map(node) });

  return {
    model: data.model,
    platform: data.platform,
    sources: data.sources,
    unresolved: data.unresolved,
    kernels,
    ops: new Map(data.ops.map((packed) => [packed.name, op(packed)])),
    graph: node(data.graph),
    outside: data.outside.map(op),
    direct: data.direct.map((packed) => ({ kernel: kernels[packed.kernel], sites: packed.sites.map(site) })),
  };
})();

/** An element with attributes and children; strings are always text, never markup. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

/** A path or a name that can wrap at its separators. */
function breakable(text) {
  return text.split(/(?<=[/_])(?=[^/_])|(?=\.(?!py\b))/).flatMap((part, number) => (number ? [element("wbr"), part] : [part]));
}

/** Fills an element with a text and marks the places that match a word. `write` turns text into nodes. */
function mark(target, text, words, write = breakable) {
  target.replaceChildren();
  const lower = text.toLowerCase();
  let done = 0;
  while (done < text.length) {
    let [start, end] = [text.length, text.length];
    for (const word of words) {
      const found = lower.indexOf(word, done);
      if (found >= 0 && (found < start || (found === start && found + word.length > end))) {
        [start, end] = [found, found + word.length];
      }
    }
    if (start > done) target.append(...write(text.slice(done, start)));
    if (end > start) target.append(element("mark", {}, ...write(text.slice(start, end))));
    done = end;
  }
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;
const baseName = (file) => file.slice(file.lastIndexOf("/") + 1);

/** Places on one line: `a.py:1, :2, b.py:3`. */
function places(sites) {
  return sites
    .map((site, number) => `${number && sites[number - 1].file === site.file ? "" : baseName(site.file)}:${site.line}`)
    .join(", ");
}
