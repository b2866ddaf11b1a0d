// Draws the page: state → figures (data.js) → elements. The address after # is the state.

const WAYS = { rest: "at rest", use: "in use", gradient: "gradient", optimizer: "optimizer state" };
const FIRST = { entry: "transformer", size: "8b", device: "v5p", devices: "16", batch_size: "32", seq_len: "4096", rules: "fsdp",
  rules_2: "fsdp_tp", array: "layers/mlp/up", way: "rest", at: "0", step: "" }; // the second strategy's fields end in _2
const SIDES = ["", "_2"];
const LABELED = 64; // devices or parts with room for text

/** An element; attributes that begin with "on" are listeners, and those that are false are left out. */
function h(tag, attributes = {}, ...children) {
  const svg = ["svg", "path"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child || child === 0));
  return element;
}
const prose = (text) => text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
const comma = (number) => number.toLocaleString("en-US");

// ---- state ---------------------------------------------------------------------------------------

let state = {};

/** The nearest state that exists: what a choice rules out gets the first value that fits. */
function settled(wanted) {
  const next = { ...FIRST, ...DATA.start, ...wanted };
  const pick = (name, from) => (next[name] = from.map(String).includes(next[name]) ? next[name] : String(from[0]));
  const near = (name, from) => (next[name] = String(from.reduce((a, b) => (distance(next[name], b) < distance(next[name], a) ? b : a))));
  pick("entry", Object.keys(DATA.entries));
  const { sizes } = DATA.entries[next.entry];
  pick("size", sizes[next.size] ? [next.size] : Object.keys(sizes).slice(-1));
  pick("device", Object.keys(DATA.chips));
  near("devices", DATA.chips[next.device].counts.filter((count) => sizes[next.size].layouts[count]));
  near("batch_size", DATA.rows);
  if (sizes[next.size].lengths[0]) near("seq_len", sizes[next.size].lengths);
  for (const side of SIDES) {
    const strategies = strategiesOf(next);
    pick(`rules${side}`, [...Object.keys(strategies), ...(side ? ["none"] : [])]);
    if (next[`rules${side}`] !== "none") pick(`mesh${side}`, Object.keys(strategies[next[`rules${side}`]]));
  }
  const arrays = arraysOf(choice(next, "")), matrix = arrays.find(({ axes }) => axes.length > 2) ?? arrays[0];
  pick("array", [matrix.id, ...arrays.map(({ id }) => id)]);
  pick("way", Object.keys(WAYS));
  next.at = String(Math.min(Number(next.at) || 0, Number(next.devices) - 1));
  return next;
}
const distance = (a, b) => Math.abs(Math.log(Math.max(Number(a) || 1, 1) / b));

const choice = ({ entry, size, device, devices, ...of }, side) => ({ entry, size, devices, chip: device, strategy: of[`rules${side}`],
  mesh: of[`mesh${side}`], rows: Number(of.batch_size), length: Number(of.seq_len) });

function go(changes) {
  state = settled({ ...state, ...changes });
  history.replaceState(null, "", `#${new URLSearchParams(state)}`);
  draw();
}

// ---- the choices at the top ----------------------------------------------------------------------

function select(label, name, groups) {
  const option = ([value, text = value]) => h("option", { value, selected: state[name] === value }, text);
  const options = groups.map(([group, all]) => (group ? h("optgroup", { label: group }, all.map(option)) : all.map(option)));
  return h("label", {}, label, h("select", { id: name, onchange: ({ target }) => go({ [name]: target.value }) }, options));
}
const input = (attributes, onchange) => h("input", { ...attributes, onchange: ({ target }) => onchange(target) });
const fields = (legend, ...inputs) => h("fieldset", {}, h("legend", {}, legend), inputs);
const dims = (shape) => `[${shape.map(comma).join(", ")}]`;

function choices() {
  const { sizes } = DATA.entries[state.entry], { lengths, layouts } = sizes[state.size], arrays = arraysOf(choice(state, ""));
  const listed = (values) => values.map((value) => [String(value)]);
  const of = (group) => arrays.filter((array) => array.group === group).map(({ id, label, shape }) => [id, `${label} ${dims(shape)}`]);
  const groups = [["Weights", of("weight")], ["Activations", of("activation")], ["Keys and values in the cache", of("cache")]];
  const ways = Object.entries(WAYS).map(([way, text]) => h("label", {}, input({ type: "radio", name: "way", id: `way_${way}`,
    checked: state.way === way }, () => go({ way })), text));
  const two = input({ type: "checkbox", id: "two", checked: state.rules_2 !== "none" },
    ({ checked }) => go({ rules_2: checked ? FIRST.rules_2 : "none" }));
  return [
    select("Entry", "entry", [["", listed(Object.keys(DATA.entries))]]),
    select("Size", "size", [["", Object.keys(sizes).map((name) => [name, name === "run" ? "this run" : name])]]),
    select("Device", "device", [["", Object.entries(DATA.chips).map(([kind, { name }]) => [kind, `${kind} (${name})`])]]),
    select("Devices", "devices", [["", listed(DATA.chips[state.device].counts.filter((count) => layouts[count]))]]),
    select("Rows of a batch", "batch_size", [["", listed(DATA.rows)]]),
    lengths[0] > 0 && select("Tokens of a row", "seq_len", [["", listed(lengths)]]),
    select("Array", "array", groups.filter(([, all]) => all.length)),
    arrays.find(({ id }) => id === state.array).group === "weight" && fields("Shown", ...ways),
    fields("Compare", h("label", {}, two, "two strategies")),
  ].filter(Boolean);
}

// ---- one side: a strategy on a mesh --------------------------------------------------------------

/** What a side shows: its layout, and the chosen array's parts, numbered in order of their first device. */
function figuresOf(side) {
  const chosen = choice(state, side), layout = layoutOf(chosen), mesh = layout.mesh;
  const array = arraysOf(chosen).find(({ id }) => id === state.array);
  const how = array.group === "weight" ? (state.way === "use" ? "use" : "rest") : "";
  const spec = specOf(chosen, layout, array.axes, how), slices = slicesOf(mesh, spec, array.shape), parts = new Map();
  slices.forEach((slice, device) => parts.set(String(slice), [...(parts.get(String(slice)) ?? []), device]));
  const all = [...parts.values()].map((holders) => ({ holders, slice: slices[holders[0]] }));
  // Rows of the picture are parts of the first dim that is split, columns those of the others.
  const rowDim = array.shape.findIndex((dim, i) => new Set(all.map(({ slice }) => slice[i][0])).size > 1);
  all.sort((a, b) => order(a.slice.map(([start]) => start), b.slice.map(([start]) => start)));
  const rows = Math.max(new Set(all.map(({ slice }) => slice[rowDim]?.[0])).size, 1), columns = all.length / rows;
  all.forEach((part, i) => {
    const [turn, shade] = rows > 1 ? [Math.floor(i / columns) / rows, (i % columns) / Math.max(columns - 1, 1)] : [i / columns, 0];
    Object.assign(part, { name: i, hue: 255 + 360 * turn, shade });
  });
  const partOf = [];
  all.forEach((part) => part.holders.forEach((device) => (partOf[device] = part)));
  return { side, chosen, ...layout, array, how, spec, all, partOf, columns, places: placesOf(mesh), grid: gridOf(mesh) };
}

const order = (a, b) => a.map((each, i) => each - b[i]).find((difference) => difference) ?? 0;
const tint = ({ hue, shade }) => `--hue:${hue.toFixed(1)};--shade:${shade.toFixed(2)}`;
const range = (slice, shape) =>
  `[${slice.map(([start, stop], i) => (start === 0 && stop === shape[i] ? ":" : `${start}:${stop}`)).join(", ")}]`;
const where = (place) => Object.entries(place).map(([axis, at]) => `${axis} ${at}`).join(", ");

/** The grid in which a side's devices are drawn: the last axis across or down if that is compact. */
function gridOf(mesh) {
  const count = product(Object.values(mesh)), inner = Object.values(mesh).at(-1), [least, most] = count > LABELED ? [8, 32] : [4, 8];
  const compact = ({ columns, rows }) => columns >= least && columns <= most && rows <= 2 * columns;
  const plain = [most, 8, 16, 7, 6, 5, 10, 9].find((n) => count % n === 0 && n <= most) ?? Math.min(count, most);
  const every = [{ columns: inner, rows: count / inner, down: false }, { columns: count / inner, rows: inner, down: true }];
  return every.find(compact) ?? { columns: plain, rows: Math.ceil(count / plain), down: false };
}
const spot = ({ columns, rows, down }, device) =>
  (down ? [Math.floor(device / rows), device % rows] : [device % columns, Math.floor(device / columns)]);

function devices(f) {
  const { places, partOf, array } = f, { columns, rows, down } = f.grid;
  const cells = places.map((place, device) => {
    const part = partOf[device], label = `${device} part ${part.name} of ${f.all.length}: ${range(part.slice, array.shape)}, at ${where(place)}`;
    const listeners = { onmouseenter: () => light(device), onfocus: () => light(device), onclick: () => go({ at: String(device) }),
      onkeydown: (event) => walk(event, device, f.grid) };
    return h("button", { type: "button", class: "part", style: tint(part), "data-holders": device, "data-twins": part.holders.join(" "),
      "aria-label": label, title: label, tabindex: String(device) === state.at ? 0 : -1, ...listeners },
    h("b", {}, device), h("span", {}, ` part ${part.name}`));
  });
  const many = places.length > LABELED, [lines, flow, n] = down ? ["rows", "column", rows] : ["columns", "row", columns];
  const style = `grid-template-${lines}:repeat(${n}, minmax(0, 1fr));grid-auto-flow:${flow}`;
  return h("div", { class: "devices", style: `--columns:${columns};--cell:${many ? "1.4rem" : "4.1rem"}`, onmouseleave: unpoint },
    h("div", { class: `cells${many ? " many" : ""}`, style, role: "group", "aria-label": `Devices of ${f.chosen.mesh}; arrow keys move` }, cells),
    h("svg", { viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", "aria-hidden": "true" }));
}

function walk(event, device, { columns, rows, down }) {
  const [across, below] = down ? [rows, 1] : [1, columns];
  const by = { ArrowRight: across, ArrowLeft: -across, ArrowDown: below, ArrowUp: -below }[event.key];
  const next = by && event.target.parentElement.children[device + by];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

/** The array itself, cut into its parts. */
function picture({ all, array, columns }) {
  const many = all.length / columns > 16 || columns > 8;
  return h("div", { class: `array${many ? " many" : ""}`, style: `--columns:${columns}` }, all.map((part) => {
    const { name, slice, holders } = part, title = `part ${name}: ${range(slice, array.shape)} on ${holders.join(", ")}`;
    return h("div", { class: "part", style: tint(part), "data-holders": holders.join(" "), title, onmouseleave: unpoint,
      onmouseenter: () => light(holders[0]) },
    h("b", {}, `part ${name}`), ` on ${holders.length > 8 ? `${holders.length} devices` : holders.join(", ")}`);
  }));
}

const scroll = (label, child) => h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, child);
const table = (caption, heads, rows) => scroll(caption, h("table", {}, h("caption", {}, caption),
  h("thead", { class: "hidden" }, h("tr", {}, heads.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows)));

/** The rule that each dim of the array follows, and the line of the zoo where it stands. */
function rules({ mesh, array, how, spec, chosen }) {
  const { in_use, uneven, causes } = DATA.entries[chosen.entry], split = causes.strategies[chosen.strategy] ?? {};
  return table("The array's dims, and the rule behind each", ["Dim", "Parts", "Rule"], array.axes.map((rest, i) => {
    const axis = how === "use" ? in_use[rest] ?? rest : rest, row = causes.rows[split[axis]];
    const target = axis && DATA.entries[chosen.entry].rules[chosen.strategy][axis], parts = product(spec[i].map((each) => mesh[each]));
    const rule = h("code", {}, `${row?.[0] ? `${row[0]}: ` : ""}"${axis}": ${JSON.stringify(target)}`);
    const why = !axis ? "has no logical axis" : target ? [rule, " ", row && [prose(row[4]), " ", link(row)]]
      : axis === rest ? "no rule of this strategy splits it" : `${rest} at rest, ${axis} in use: gathered`;
    const instead = uneven[axis] === "padded" ? "whole at rest and padded in use" : "replicated";
    return h("tr", {}, h("th", { scope: "row" }, h("code", {}, axis ?? "—"), h("br"), comma(array.shape[i])),
      h("td", {}, parts > 1 ? `${parts} parts over ${over(spec[i])}` : "whole"),
      h("td", {}, why, target && !spec[i].length && ` Not divisible by its mesh axes, so ${instead}.`));
  }));
}
const link = ([, , file, line]) => h("a", { href: `${DATA.source}${file}#L${line}` }, `${file}:${line}`);

/** The tables that a strategy is the union of. */
function union({ chosen }) {
  const { rows, strategies } = DATA.entries[chosen.entry].causes;
  const tables = new Map(Object.values(strategies[chosen.strategy] ?? {}).map((index) => [rows[index][0], rows[index]]));
  return h("ul", { class: "union" }, [...tables].map(([name, row]) =>
    h("li", {}, h("code", {}, name || "RULES"), row[1] ? [": ", prose(row[1])] : "", " ", link(row))));
}

// ---- a layer's steps -----------------------------------------------------------------------------

/** Sublayers of a layer with their steps: {name, steps: [{label, detail, transfer}]}. */
function layer({ chosen, sent }) {
  const of = (purpose, label, name = "") =>
    sent.filter((each) => each.purpose === purpose && each.sublayer === name).map((transfer) => ({ label, transfer }));
  const matmul = (detail) => (detail ? [{ label: "matmul", detail }] : []);
  const found = sizeOf(chosen).sublayers.map(({ name, reads, writes, attends, routes }) => ({ name, steps: [
    ...of("weights", "gather weights", name),
    ...(routes ? [{ label: "route" }, ...of("exchanges", "exchange rows")] : []),
    ...matmul(reads),
    ...(attends ? [...of("attention", "exchange heads or keys"), { label: "attention" }] : []),
    ...matmul(writes),
    ...of("activations", "sum activations", name),
    ...of("gradients", "sum gradients", name),
    ...of("updates", "gather updated weights", name),
  ] }));
  const stages = of("stages", "to the next stage");
  return stages.length ? [...found, { name: "between stages", steps: stages }] : found;
}

const over = (axes) => axes.join(" and ");
const keyOf = ({ purpose, kind, axes }, name) => [name, purpose, kind, ...axes].join(" ");

function timeline(f) {
  const sublayers = layer(f), sends = ({ transfer }) => transfer;
  f.steps = sublayers.flatMap(({ name, steps }) => steps.filter(sends).map(({ transfer }) => ({ key: keyOf(transfer, name), transfer })));
  const button = ({ label, detail, transfer }, name) => {
    if (!transfer) return h("span", { class: "step" }, label, detail && h("small", {}, detail));
    const key = keyOf(transfer, name), pressed = state.step === key, show = () => flow(f, transfer), hide = () => flow(f);
    return h("button", { type: "button", class: "step", id: `step${f.side} ${key}`, "aria-pressed": String(pressed),
      onclick: () => go({ step: pressed ? "" : key }), onmouseenter: show, onfocus: show, onmouseleave: hide, onblur: hide },
    label, h("small", {}, `${size(transfer.bytes)} ${transfer.kind} over ${over(transfer.axes)}`));
  };
  return h("ol", { class: "layer" }, sublayers.map(({ name, steps }) =>
    h("li", {}, h("span", {}, name), h("ol", {}, steps.map((step) => h("li", {}, button(step, name)))))));
}

/** Devices that differ only along these axes, group by group. */
function groupsOf({ places }, axes) {
  const groups = new Map();
  places.forEach((place, device) => {
    const rest = JSON.stringify({ ...place, ...Object.fromEntries(axes.map((axis) => [axis, 0])) });
    groups.set(rest, [...(groups.get(rest) ?? []), device]);
  });
  return [...groups.values()];
}

/** Draws who sends to whom: around rings, or from one device to all for an all-to-all. */
function flow(f, transfer = f.steps.find(({ key }) => key === state.step)?.transfer) {
  const svg = f.element.querySelector("svg"), told = f.element.querySelector(".told");
  svg.replaceChildren();
  told.textContent = f.steps.length ? "Point at a step in red to see who sends to whom." : "Nothing is sent.";
  if (!transfer) return;
  const groups = groupsOf(f, transfer.axes), near = groups.find((group) => group.includes(lit));
  const center = (device) => spot(f.grid, device).map((at) => at + 0.5);
  const toAll = transfer.kind === "all-to-all";
  for (const group of f.places.length > LABELED ? [near] : groups) {
    const from = group.includes(lit) ? lit : group[0], others = group.filter((device) => device !== from);
    const pairs = toAll ? others.map((device) => [from, device]) : group.map((device, i) => [device, group[(i + 1) % group.length]]);
    for (const [start, stop] of pairs) svg.append(...arrow(route(center(start), center(stop), !toAll && stop < start), group === near));
  }
  const [first, second] = near, rings = `${groups.length} group${groups.length > 1 ? "s" : ""} of ${near.length} devices`;
  const ring = `around a ring: ${first} → ${second}${near.length > 2 ? " → …" : ""} → ${first}`;
  const to = toAll ? `to the other ${near.length - 1}` : ring;
  told.textContent = `${transfer.kind} of ${transfer.purpose} over ${over(transfer.axes)}, ${rings}: each device sends `
    + `${size(transfer.bytes)} a step ${to}.`;
}

const EDGE = 0.38, LANE = 0.46; // from a cell's center: where arrows touch it, and where they run in the gap beside it

/** The corners of an arrow's way: straight between neighbors, else through the gaps between cells, never across a label. */
function route([x1, y1], [x2, y2], closesRing) {
  const [right, down] = [Math.sign(x2 - x1), Math.sign(y2 - y1)];
  if (Math.hypot(x2 - x1, y2 - y1) < 1.1) return [[x1 + right * EDGE, y1 + down * EDGE], [x2 - right * EDGE, y2 - down * EDGE]];
  if (!down) return [[x1, y1 - right * EDGE], [x1, y1 - right * LANE], [x2, y1 - right * LANE], [x2, y1 - right * EDGE]];
  if (!right) return [[x1 + down * EDGE, y1], [x1 + down * LANE, y1], [x1 + down * LANE, y2], [x1 + down * EDGE, y2]];
  const out = closesRing ? 1 : down, enter = closesRing ? -1 : -down; // a ring's last arrow goes around all rows
  const aside = closesRing ? 0.5 - LANE : x2 - LANE, leave = [[x1, y1 + out * EDGE], [x1, y1 + out * LANE]];
  if (!closesRing && Math.abs(y2 - y1) === 1) return [...leave, [x2, y1 + out * LANE], [x2, y2 + enter * EDGE]];
  return [...leave, [aside, y1 + out * LANE], [aside, y2 + enter * LANE], [x2, y2 + enter * LANE], [x2, y2 + enter * EDGE]];
}

function arrow(corners, near) {
  const [tip, before] = [corners.at(-1), corners.at(-2)], length = Math.hypot(tip[0] - before[0], tip[1] - before[1]);
  const [dx, dy] = [(tip[0] - before[0]) / length, (tip[1] - before[1]) / length];
  const neck = [tip[0] - dx * 0.13, tip[1] - dy * 0.13], [wx, wy] = [-dy * 0.08, dx * 0.08];
  const line = [...corners.slice(0, -1), length > 0.13 ? neck : before].join(" L");
  return [h("path", { class: `flow${near ? " near" : ""}`, d: `M${line}` }),
    h("path", { class: `head${near ? " near" : ""}`, d: `M${tip} L${neck[0] + wx},${neck[1] + wy} L${neck[0] - wx},${neck[1] - wy} Z` })];
}

// ---- figures -------------------------------------------------------------------------------------

function memory({ memory, chosen, divides }) {
  if (!divides) return h("p", { class: "error" }, `${chosen.mesh} can't divide these rows: choose another batch or mesh.`);
  const chip = DATA.chips[chosen.chip], parts = Object.entries(memory), total = sum(Object.values(memory));
  const most = Math.max(total, chip.memory), usable = chip.memory * DATA.usable, share = (bytes) => `${((100 * bytes) / most).toFixed(2)}%`;
  const verdict = total <= usable ? `of the ${size(usable)} that a program may use` : `does not fit into ${size(usable)}`;
  const bars = parts.map(([, bytes], i) => h("i", { style: `width:${share(bytes)};background:var(--m${i})` }));
  const key = parts.map(([name, bytes], i) => h("li", {}, h("i", { style: `background:var(--m${i})` }), `${name} ${size(bytes)}`));
  return [
    h("p", {}, `A device of ${size(chip.memory)}: ${size(total)} ${verdict}.`),
    h("div", { class: "memory", "aria-hidden": "true" }, bars, h("span", { class: "limit", style: `left:${share(usable)}` })),
    h("ul", { class: "key" }, key),
  ];
}

function bytes({ sent, divides }) {
  if (!sent.length) return h("p", {}, divides ? "A step sends nothing." : "—");
  const sums = new Map();
  for (const { purpose, kind, axes, bytes } of sent) {
    const key = `${kind} ${purpose} ${axes}`;
    sums.set(key, { purpose, kind, axes, bytes: bytes + (sums.get(key)?.bytes ?? 0) });
  }
  const sorted = [...sums.values()].sort((a, b) => b.bytes - a.bytes);
  const rows = sorted.map(({ purpose, kind, axes, bytes }) => {
    const bar = h("span", { class: "bar", style: `width:${((100 * bytes) / sorted[0].bytes).toFixed(1)}%` });
    return h("tr", {}, h("th", { scope: "row" }, `${kind} of ${purpose}`), h("td", {}, over(axes)), h("td", { class: "wide" }, bar),
      h("td", { class: "number" }, size(bytes)));
  });
  const caption = `A device sends ${size(sum(sorted.map((each) => each.bytes)))} in a step, by collective and mesh axis`;
  return table(caption, ["Collective", "Mesh axes", "Share", "Bytes"], rows);
}

function facts({ all, sent, memory, divides }) {
  const copies = all[0].holders.length, plural = (n, one, more) => `${n} ${n > 1 ? more : one}`;
  const pairs = [["memory a device", divides ? size(sum(Object.values(memory))) : "—"],
    ["sent a step", divides ? size(sum(sent.map(({ bytes }) => bytes))) : "—"],
    ["this array", `${plural(all.length, "part", "parts")} × ${plural(copies, "copy", "copies")}`]];
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function command({ chosen }) {
  const { entry, size, mesh, strategy, rows, length } = chosen, tokens = sizeOf(chosen).lengths[0] ? ` --seq_len=${length}` : "";
  const flags = `--size=${size} --mesh=${mesh} --rules=${strategy} --batch_size=${rows}${tokens}`;
  return h("pre", { tabindex: 0, role: "group", "aria-label": "Command" }, h("code", {}, `python -m recipes.${entry} ${flags}`));
}

function content(f) {
  const { array, mesh } = f, axes = Object.entries(mesh).map(([axis, n]) => `${axis} ${n}`).join(" × ");
  const title = `${array.label} ${dims(array.shape)}${array.group === "weight" ? `, ${WAYS[state.way]}` : ""}`;
  const note = "Bytes are those that a device sends in a whole step: in all layers, forward and backward.";
  return [
    facts(f),
    h("h2", {}, "Devices"), h("p", { class: "axes" }, `${axes}; devices of one color hold the same part`), devices(f),
    h("p", { class: "told dim" }),
    h("h2", {}, "A layer's steps"), timeline(f), h("p", { class: "dim small" }, note),
    h("h2", {}, title), picture(f), rules(f),
    h("h2", {}, "Memory"), memory(f),
    h("h2", {}, "Bytes"), bytes(f),
    h("h2", {}, `The strategy ${f.chosen.strategy}`), union(f), f.chosen.size !== "run" && command(f),
  ];
}

let shown = []; // the figures of the sides

function side(name) {
  const strategies = strategiesOf(state), listed = (values) => [["", Object.keys(values).map((each) => [each])]];
  const pick = h("div", { class: "pick" }, select("Strategy", `rules${name}`, listed(strategies)),
    select("Mesh", `mesh${name}`, listed(strategies[state[`rules${name}`]])));
  const label = `${name ? "Second" : "First"} strategy: ${state[`rules${name}`]} on ${state[`mesh${name}`]}`;
  const element = h("section", { class: "side", "aria-label": label }, pick), f = { ...figuresOf(name), element };
  element.append(...content(f).filter(Boolean).flat());
  shown.push(f);
  return element;
}

// ---- pointing ------------------------------------------------------------------------------------

let lit = 0; // the device that is pointed at

/** Lights a device, its parts and their copies on both sides. */
function light(device) {
  lit = device;
  for (const element of document.querySelectorAll(".part")) {
    const holders = element.dataset.holders.split(" ");
    element.classList.toggle("lit", holders.includes(String(device)));
    element.classList.toggle("twin", (element.dataset.twins ?? "").split(" ").includes(String(device)));
  }
  for (const f of shown) flow(f);
  document.getElementById("said").textContent = shown.map(({ chosen, places, partOf, array }) => {
    const { name, slice } = partOf[device];
    return `${chosen.strategy}: device ${device} (${where(places[device])}) holds part ${name}, ${range(slice, array.shape)}.`;
  }).join(" ");
}

const unpoint = () => light(Number(state.at));

function draw() {
  const focused = document.activeElement?.id || (document.activeElement?.closest(".cells") && state.at);
  const inSide = [...document.querySelectorAll(".side")].findIndex((each) => each.contains(document.activeElement));
  shown = [];
  document.getElementById("choices").replaceChildren(...choices());
  document.getElementById("sides").replaceChildren(...SIDES.filter((name) => state[`rules${name}`] !== "none").map(side));
  unpoint();
  const again = inSide < 0 ? document : document.querySelectorAll(".side")[inSide];
  if (focused) (again?.querySelector(`[id="${focused}"]`) ?? again?.querySelectorAll(".cells button")[focused])?.focus();
}

const fromAddress = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
addEventListener("hashchange", () => go(fromAddress()));
document.getElementById("choices").addEventListener("submit", (event) => event.preventDefault());
go(fromAddress());
