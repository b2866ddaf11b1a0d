// Draws the page: state → figures (compute.js) → elements. The address after # is the state.

const WAYS = { rest: "at rest", use: "in use", gradient: "gradient", optimizer: "optimizer state" };
const FIRST = { entry: "transformer", size: "8b", chip: "v5p", devices: "16", batch: "32", seq: "4096",
  a: "fsdp", b: "fsdp_tp", array: "layers/mlp/up", way: "rest", device: "0", step: "" };
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
const size = (bytes) => call("size", [bytes]);
const comma = (number) => number.toLocaleString("en-US");

// ---- state ---------------------------------------------------------------------------------------

let state = {};

/** The nearest state that exists: what a choice rules out gets the first value that fits. */
function settled(wanted) {
  const next = { ...FIRST, ...DATA.start, ...wanted }, pick = (value, from) => (from.includes(value) ? value : from[0]);
  next.entry = pick(next.entry, Object.keys(DATA.entries));
  const { sizes, zoo } = DATA.entries[next.entry], strategies = zoo.RULES.keys();
  next.size = pick(next.size, [...Object.keys(sizes)]);
  next.chip = pick(next.chip, Object.keys(DATA.chips));
  next.devices = pick(next.devices, counts(next.chip));
  for (const [name, most] of Object.entries(DATA.most)) next[name] = String(Math.min(Math.max(Math.round(Number(next[name]) || 1), 1), most));
  for (const side of ["a", "b"]) {
    next[side] = side === "b" && next.b === "none" ? "none" : pick(next[side], strategies);
    if (next[side] !== "none") next[`mesh_${side}`] = pick(next[`mesh_${side}`], meshesOf(next, side));
  }
  const arrays = arraysOf(choice(next, "a")), matrix = arrays.find(({ axes }) => axes.length > 2) ?? arrays[0];
  next.array = arrays.some(({ id }) => id === next.array) ? next.array : matrix.id;
  next.way = pick(next.way, Object.keys(WAYS));
  next.device = String(Math.min(Number(next.device) || 0, Number(next.devices) - 1));
  return next;
}
const counts = (chip) => [...Array.from({ length: 64 }, (_, i) => i + 1), ...DATA.chips[chip].pods].map(String);

/** The meshes that a strategy is offered, and the one that the page began with. */
function meshesOf({ entry, devices, ...of }, side) {
  const found = meshesFor(entry, of[side], Number(devices)), { a, mesh_a, devices: count } = DATA.start;
  return a === of[side] && count === devices && !found.includes(mesh_a) ? [mesh_a, ...found] : found;
}
const choice = (of, side) => ({ entry: of.entry, size: of.size, strategy: of[side], mesh: of[`mesh_${side}`], chip: of.chip, batch: Number(of.batch), seq: Number(of.seq) });

function go(changes) {
  state = settled({ ...state, ...changes });
  history.replaceState(null, "", `#${new URLSearchParams(state)}`);
  draw();
}

// ---- the choices at the top ----------------------------------------------------------------------

function select(label, name, groups, attributes = {}) {
  const option = ([value, text = value]) => h("option", { value, selected: state[name] === value }, text);
  const options = groups.map(([group, values]) => (group ? h("optgroup", { label: group }, values.map(option)) : values.map(option)));
  return h("label", {}, label, h("select", { id: name, onchange: ({ target }) => go({ [name]: target.value }), ...attributes }, options));
}
const number = (label, name) => h("label", {}, label, h("input", { id: name, type: "number", min: 1, max: DATA.most[name], value: state[name],
  onchange: ({ target }) => go({ [name]: target.value }) }));

function choices() {
  const { sizes } = DATA.entries[state.entry], { pods } = DATA.chips[state.chip], arrays = arraysOf(choice(state, "a"));
  const listed = (values) => values.map((value) => [String(value)]);
  const of = (group) => arrays.filter((array) => array.group === group).map(({ id, label, shape }) => [id, `${label} [${shape.map(comma).join(", ")}]`]);
  const current = arrays.find(({ id }) => id === state.array);
  const ways = Object.entries(WAYS).map(([way, text]) => h("label", {}, h("input", { type: "radio", name: "way", id: `way_${way}`, value: way,
    checked: state.way === way, onchange: () => go({ way }) }), text));
  return [
    select("Entry", "entry", [["", listed(Object.keys(DATA.entries))]]),
    select("Size", "size", [["", Object.keys(sizes).map((name) => [name, name === "run" ? "this run" : name])]]),
    select("Device", "chip", [["", Object.entries(DATA.chips).map(([kind, { name }]) => [kind, `${kind} (${name})`])]]),
    select("Devices", "devices", [["", listed(counts(state.chip).slice(0, 64))], ["Pods", pods.map((n) => [String(n), `${state.chip}:${n}`])]]),
    number("Rows of a batch", "batch"),
    "vocab_size" in sizes[state.size].config && number("Tokens of a row", "seq"),
    select("Array", "array", [["Weights", of("weight")], ["Activations", of("activation")], ["Keys and values in the cache", of("cache")]].filter(([, all]) => all.length)),
    current.group === "weight" && h("fieldset", {}, h("legend", {}, "Shown"), ways),
    h("fieldset", {}, h("legend", {}, "Compare"), h("label", {}, h("input", { type: "checkbox", id: "two", checked: state.b !== "none",
      onchange: ({ target }) => go({ b: target.checked ? FIRST.b : "none" }) }), "two strategies")),
  ].filter(Boolean);
}

// ---- one side: a strategy on a mesh --------------------------------------------------------------

/** What a side shows: its layout, and the chosen array's parts, numbered in order of their first device. */
function figuresOf(side) {
  const chosen = choice(state, side), layout = layoutOf(chosen), mesh = layout.mesh;
  const array = arraysOf(chosen).find(({ id }) => id === state.array);
  const how = array.group === "weight" ? (state.way === "use" ? "use" : "rest") : "";
  const spec = specOf(layout, array.axes, how), slices = slicesOf(mesh, spec, array.shape), parts = new Map();
  slices.forEach((slice, device) => parts.set(String(slice), [...(parts.get(String(slice)) ?? []), device]));
  const all = [...parts.entries()].map(([, holders], index) => ({ index, holders, slice: slices[holders[0]] }));
  // Rows of the picture are parts of the first dim that is split, columns those of the others.
  const rowDim = array.shape.findIndex((dim, i) => new Set(all.map(({ slice }) => slice[i][0])).size > 1);
  all.sort((a, b) => order(a.slice.map(([start]) => start), b.slice.map(([start]) => start)));
  const rows = Math.max(new Set(all.map(({ slice }) => slice[rowDim]?.[0])).size, 1), columns = all.length / rows;
  all.forEach((part, i) => {
    Object.assign(part, { name: i, hue: 255 + (360 * (rows > 1 ? Math.floor(i / columns) : i)) / (rows > 1 ? rows : columns), shade: rows > 1 && columns > 1 ? (i % columns) / (columns - 1) : 0 });
  });
  const partOf = [];
  all.forEach((part) => part.holders.forEach((device) => (partOf[device] = part)));
  return { side, chosen, layout, mesh, array, how, spec, all, partOf, columns, places: placesOf(mesh), grid: gridOf(mesh), sent: sentBy(layout), memory: memoryOf(layout) };
}

const tint = ({ hue, shade }) => `--hue:${hue.toFixed(1)};--shade:${shade.toFixed(2)}`;
const range = (slice, shape) => slice.map(([start, stop], i) => (start === 0 && stop === shape[i] ? ":" : `${start}:${stop}`)).join(", ");
const where = (place) => Object.entries(place).map(([axis, at]) => `${axis} ${at}`).join(", ");

/** The grid in which a side's devices are drawn: the last axis across or down if that is compact. */
function gridOf(mesh) {
  const count = mesh.size, inner = mesh.shape.get(mesh.axis_names.at(-1)), [least, most] = count > LABELED ? [8, 32] : [4, 8];
  const compact = ({ columns, rows }) => columns >= least && columns <= most && rows <= 2 * columns;
  const plain = [most, 8, 16, 7, 6, 5, 10, 9].find((n) => count % n === 0 && n <= most) ?? Math.min(count, most);
  const every = [{ columns: inner, rows: count / inner, down: false }, { columns: count / inner, rows: inner, down: true }];
  return every.find(compact) ?? { columns: plain, rows: Math.ceil(count / plain), down: false };
}
const spot = ({ columns, rows, down }, device) => (down ? [Math.floor(device / rows), device % rows] : [device % columns, Math.floor(device / columns)]);

function devices(f) {
  const { mesh, places, partOf, array } = f, { columns, rows, down } = f.grid;
  const cells = places.map((place, device) => {
    const part = partOf[device];
    const label = `${device} part ${part.name} of ${f.all.length}: [${range(part.slice, array.shape)}], at ${where(place)}`;
    return h("button", { type: "button", class: "part", style: tint(part), "data-holders": device, "data-twins": part.holders.join(" "),
      "aria-label": label, title: label, tabindex: String(device) === state.device ? 0 : -1,
      onmouseenter: () => light(device), onfocus: () => light(device), onclick: () => go({ device: String(device) }), onkeydown: (event) => walk(event, device, f.grid) },
    h("b", {}, device), h("span", {}, ` part ${part.name}`));
  });
  const many = mesh.size > LABELED, lines = `grid-template-${down ? "rows" : "columns"}`;
  return h("div", { class: "devices", style: `--columns:${columns};--cell:${many ? "1.4rem" : "4.1rem"}`, onmouseleave: () => light(Number(state.device)) },
    h("div", { class: `cells${many ? " many" : ""}`, style: `${lines}:repeat(${down ? rows : columns}, minmax(0, 1fr));grid-auto-flow:${down ? "column" : "row"}`,
      role: "group", "aria-label": `Devices of the mesh ${f.chosen.mesh}; arrow keys move` }, cells),
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
  return h("div", { class: `array${many ? " many" : ""}`, style: `--columns:${columns}` }, all.map((part) =>
    h("div", { class: "part", style: tint(part), "data-holders": part.holders.join(" "), title: `part ${part.name}: [${range(part.slice, array.shape)}] on ${part.holders.join(", ")}`,
      onmouseenter: () => light(part.holders[0]), onmouseleave: () => light(Number(state.device)) },
    h("b", {}, `part ${part.name}`), ` on ${part.holders.length > 8 ? `${part.holders.length} devices` : part.holders.join(", ")}`)));
}

/** The rule that each dim of the array follows, and the line of the zoo where it stands. */
function rules({ layout, array, how, spec, chosen }) {
  const { zoo } = layout, { rows, strategies } = DATA.entries[chosen.entry].causes, causes = strategies[chosen.strategy] ?? {};
  const lines = array.axes.map((rest, i) => {
    const axis = how === "use" ? zoo.IN_USE.get(rest, rest) : rest, target = axis && zoo.RULES.get(chosen.strategy).get(axis);
    const row = rows[causes[axis]], parts = spec[i].reduce((n, each) => n * layout.mesh.shape.get(each), 1);
    const why = !axis ? "has no logical axis" : !row ? (axis === rest ? "no rule of this strategy splits it" : `${rest} at rest, ${axis} in use: gathered`)
      : [h("code", {}, `${row[0] || "RULES"}: "${axis}": ${JSON.stringify(target)}`), " ", ...prose(row[4]), " ", link(row)];
    const uneven = row && !spec[i].length ? ` Not divisible by its mesh axes, so ${zoo.UNEVEN?.get(axis) === "padded" ? "whole at rest and padded in use" : "replicated"}.` : "";
    return h("tr", {}, h("th", { scope: "row" }, h("code", {}, axis ?? "—"), h("br"), `${comma(array.shape[i])}`),
      h("td", {}, parts > 1 ? `${parts} parts over ${spec[i].join(" and ")}` : "whole"), h("td", {}, why, uneven));
  });
  return h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Dims and rules" }, h("table", {}, h("caption", {}, "The array's dims, and the rule behind each"),
    h("thead", { class: "hidden" }, h("tr", {}, ["Dim", "Parts", "Rule"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, lines)));
}
const link = ([, , file, line]) => h("a", { href: `${DATA.source}${file}#L${line}` }, `${file}:${line}`);

/** The tables that a strategy is the union of. */
function union({ chosen }) {
  const { rows, strategies } = DATA.entries[chosen.entry].causes;
  const tables = new Map(Object.values(strategies[chosen.strategy] ?? {}).map((index) => [rows[index][0], rows[index]]));
  return h("ul", { class: "union" }, [...tables].map(([name, row]) => h("li", {}, h("code", {}, name || "RULES"), row[1] ? [": ", prose(row[1]), " "] : " ", link(row))));
}

// ---- a layer's steps -----------------------------------------------------------------------------

/** Sublayers of a layer with their steps: {name, steps: [{label, detail, transfer}]}. */
function layer({ layout, chosen, sent }) {
  const { query, choice: expert, stack } = DATA.names, weights = Object.values(DATA.entries[chosen.entry].sizes[chosen.size].weights).flat();
  const stacked = weights.filter(([, , axes]) => axes[0] === stack), groups = new Map();
  for (const [path, , axes] of stacked.length ? stacked : weights) {
    const [first, second] = path.split("/"), name = stacked.length ? `${first}/${second}` : /^\d+$/.test(second) ? `${first}/${second}` : first;
    if (/\/[1-9]\d*$/.test(name) || !axes.some((axis) => layout.zoo.IN_USE.has(axis))) continue; // blocks after the first; norms
    groups.set(name, [...(groups.get(name) ?? []), [path, axes]]);
  }
  const found = [...groups].map(([name, members]) => {
    const paths = members.map(([path]) => path), has = (axis) => members.some(([, axes]) => axes.includes(axis));
    const inside = (path) => (stacked.length ? path.startsWith(`${name}/`) || path === name : paths.includes(path));
    const own = sentBy(restricted(layout, inside));
    const of = (purpose, label) => own.filter((transfer) => transfer.purpose === purpose).map((transfer) => ({ label, transfer }));
    const last = (from) => [...new Set(from.map(([path]) => path.split("/").filter((each) => each !== "kernel").at(-1)))].join(", ");
    const matrices = members.filter(([, axes]) => axes.some((axis) => layout.zoo.IN_USE.has(axis))), out = ([, axes]) => layout.zoo.IN_USE.has(axes.at(-1));
    const matmul = (from) => (from.length ? [{ label: "matmul", detail: last(from) }] : []);
    const steps = [
      ...of("weights", "gather weights"),
      ...(has(expert) ? [{ label: "route" }, ...of("exchanges", "exchange rows")] : []),
      ...matmul(matrices.filter((each) => !out(each))),
      ...(has(query) ? [...of("attention", "exchange heads or keys"), { label: "attention" }] : []),
      ...matmul(matrices.filter(out)),
      ...of("activations", "sum activations"),
      ...of("gradients", "sum gradients"),
    ];
    return { name, steps };
  });
  const stages = sent.filter(({ purpose }) => purpose === "stages").map((transfer) => ({ label: "to the next stage", transfer }));
  return stages.length ? [...found, { name: "between stages", steps: stages }] : found;
}

const over = (axes) => axes.join(" and ");
const keyOf = ({ purpose, kind, axes }, name) => [name, purpose, kind, ...axes].join(" ");

function timeline(f) {
  const sublayers = layer(f);
  f.steps = sublayers.flatMap(({ name, steps }) => steps.filter(({ transfer }) => transfer).map(({ transfer }) => ({ key: keyOf(transfer, name), transfer })));
  const button = ({ label, detail, transfer }, name) => {
    if (!transfer) return h("span", { class: "step" }, label, detail && h("small", {}, detail));
    const key = keyOf(transfer, name), show = () => flow(f, transfer);
    return h("button", { type: "button", class: "step", id: `${f.side} ${key}`, "aria-pressed": String(state.step === key), onclick: () => go({ step: state.step === key ? "" : key }),
      onmouseenter: show, onfocus: show, onmouseleave: () => flow(f), onblur: () => flow(f) },
    label, h("small", {}, `${size(transfer.bytes)} ${transfer.kind} over ${over(transfer.axes)}`));
  };
  return h("ol", { class: "layer" }, sublayers.map(({ name, steps }) => h("li", {}, h("span", {}, name), h("ol", {}, steps.map((step) => h("li", {}, button(step, name)))))));
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
  for (const group of f.places.length > LABELED ? [near] : groups) {
    const from = group.includes(lit) ? lit : group[0];
    const pairs = transfer.kind === "all-to-all" ? group.filter((device) => device !== from).map((device) => [from, device]) : group.map((device, i) => [device, group[(i + 1) % group.length]]);
    for (const [start, stop] of pairs) svg.append(...arrow(center(start), center(stop), group === near));
  }
  const [first, second] = near, rings = `${groups.length} group${groups.length > 1 ? "s" : ""} of ${near.length} devices`;
  const to = transfer.kind === "all-to-all" ? `to the other ${near.length - 1}` : `around a ring: ${first} → ${second}${near.length > 2 ? " → …" : ""} → ${first}`;
  told.textContent = `${transfer.kind} of ${transfer.purpose} over ${over(transfer.axes)}, ${rings}: each device sends ${size(transfer.bytes)} a step ${to}.`;
}

/** An arrow between two neighbors' edges; a longer one bends around what lies between. */
function arrow([x1, y1], [x2, y2], near) {
  const [dx, dy] = [x2 - x1, y2 - y1], long = Math.hypot(dx, dy), straight = long < 1.5, bend = straight ? 0 : 1;
  const middle = [(x1 + x2) / 2 + (dy / long) * bend, (y1 + y2) / 2 - (dx / long) * bend];
  const toward = ([ax, ay], [bx, by], by_) => [ax + ((bx - ax) / Math.hypot(bx - ax, by - ay)) * by_, ay + ((by - ay) / Math.hypot(bx - ax, by - ay)) * by_];
  const start = toward([x1, y1], middle, 0.38), tip = toward([x2, y2], middle, 0.38), neck = toward(tip, middle, 0.14);
  const [wx, wy] = [(neck[1] - tip[1]) * 0.6, (tip[0] - neck[0]) * 0.6];
  return [h("path", { class: `flow${near ? " near" : ""}`, d: `M${start} Q${middle} ${neck}` }),
    h("path", { class: `head${near ? " near" : ""}`, d: `M${tip} L${[neck[0] + wx, neck[1] + wy]} L${[neck[0] - wx, neck[1] - wy]} Z` })];
}

// ---- figures -------------------------------------------------------------------------------------

function memory({ memory, chosen }) {
  const chip = DATA.chips[chosen.chip], parts = Object.entries(memory), total = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  const most = Math.max(total, chip.memory), usable = chip.memory * DATA.usable, share = (bytes) => `${((100 * bytes) / most).toFixed(2)}%`;
  const verdict = total <= usable ? `${size(total)} of the ${size(usable)} that a program may use` : `${size(total)} does not fit into ${size(usable)}`;
  return [
    h("p", {}, `A device of ${size(chip.memory)}: ${verdict}.`),
    h("div", { class: "memory", "aria-hidden": "true" }, parts.map(([, bytes], i) => h("i", { style: `width:${share(bytes)};background:var(--m${i})` })), h("span", { class: "limit", style: `left:${share(usable)}` })),
    h("ul", { class: "key" }, parts.map(([name, bytes], i) => h("li", {}, h("i", { style: `background:var(--m${i})` }), `${name} ${size(bytes)}`))),
  ];
}

function bytes({ sent }) {
  if (!sent.length) return h("p", {}, "A step sends nothing.");
  const sums = new Map(), total = sent.reduce((sum, { bytes }) => sum + bytes, 0);
  for (const { purpose, kind, axes, bytes } of sent) {
    const key = `${kind} ${purpose} ${axes}`;
    sums.set(key, { purpose, kind, axes, bytes: bytes + (sums.get(key)?.bytes ?? 0) });
  }
  const sorted = [...sums.values()].sort((a, b) => b.bytes - a.bytes);
  const rows = sorted.map(({ purpose, kind, axes, bytes }) => h("tr", {}, h("th", { scope: "row" }, `${kind} of ${purpose}`), h("td", {}, over(axes)),
    h("td", { class: "wide" }, h("span", { class: "bar", style: `width:${((100 * bytes) / sorted[0].bytes).toFixed(1)}%` })), h("td", { class: "number" }, size(bytes))));
  return h("table", {}, h("caption", {}, `A device sends ${size(total)} in a step, by collective and mesh axis`), h("thead", { class: "hidden" },
    h("tr", {}, ["Collective", "Mesh axes", "Share", "Bytes"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows));
}

function facts({ all, array, mesh, sent, memory }) {
  const sum = (values) => values.reduce((a, b) => a + b, 0), copies = all[0].holders.length;
  const pairs = [["memory a device", size(sum(Object.values(memory)))], ["sent a step", size(sum(sent.map(({ bytes }) => bytes)))],
    ["this array", `${all.length} part${all.length > 1 ? "s" : ""} × ${copies} ${copies > 1 ? "copies" : "copy"}`]];
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function command({ chosen }) {
  const { config } = DATA.entries[chosen.entry].sizes[chosen.size], length = "vocab_size" in config ? ` --seq_len=${chosen.seq}` : "";
  return h("pre", { tabindex: 0, role: "group", "aria-label": "Command" }, h("code", {}, `python -m recipes.${chosen.entry} --size=${chosen.size} --mesh=${chosen.mesh} --rules=${chosen.strategy} --batch_size=${chosen.batch}${length}`));
}

function content(f) {
  const { array, mesh } = f, axes = mesh.shape.pairs().map(([axis, n]) => `${axis} ${n}`).join(" × ");
  const title = `${array.label} [${array.shape.map(comma).join(", ")}]${array.group === "weight" ? `, ${WAYS[state.way]}` : ""}`;
  return [
    facts(f),
    h("h2", {}, "Devices"), h("p", { class: "axes" }, `${axes}; devices of one color hold the same part`), devices(f), h("p", { class: "told dim" }),
    h("h2", {}, "A layer's steps"), timeline(f), h("p", { class: "dim small" }, "Bytes are those that a device sends in a whole step: in all layers, forward and backward."),
    h("h2", {}, title), picture(f), rules(f),
    h("h2", {}, "Memory"), memory(f),
    h("h2", {}, "Bytes"), h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Bytes" }, bytes(f)),
    h("h2", {}, `The strategy ${f.chosen.strategy}`), union(f), f.chosen.size !== "run" && command(f),
  ];
}

let shown = []; // the figures of the sides without an error

function side(name) {
  const { zoo } = DATA.entries[state.entry], strategies = zoo.RULES.keys().map((each) => [each]);
  const meshes = meshesOf(state, name).map((each) => [each]);
  const pick = h("div", { class: "pick" }, select("Strategy", name, [["", strategies]]),
    select("Mesh", `mesh_${name}`, [["", meshes]]));
  const element = h("section", { class: "side", "aria-label": `${name === "a" ? "First" : "Second"} strategy: ${state[name]} on ${state[`mesh_${name}`]}` }, pick);
  try {
    const f = { ...figuresOf(name), element };
    element.append(...content(f).filter(Boolean).flat());
    shown.push(f);
  } catch (error) {
    if (!(error instanceof PythonError)) throw error;
    element.append(h("p", { class: "error" }, error.message));
  }
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
  document.getElementById("said").textContent = shown.map((f) => `${f.chosen.strategy}: device ${device} (${where(f.places[device])}) holds part ${f.partOf[device].name}, [${range(f.partOf[device].slice, f.array.shape)}].`).join(" ");
}

function draw() {
  const focused = document.activeElement?.id || (document.activeElement?.closest(".cells") && state.device);
  const inSide = [...document.querySelectorAll(".side")].findIndex((each) => each.contains(document.activeElement));
  shown = [];
  document.getElementById("choices").replaceChildren(...choices());
  document.getElementById("sides").replaceChildren(...["a", "b"].filter((name) => state[name] !== "none").map(side));
  light(Number(state.device));
  const again = inSide < 0 ? document : document.querySelectorAll(".side")[inSide];
  if (focused) (again?.querySelector(`[id="${focused}"]`) ?? again?.querySelectorAll(".cells button")[focused])?.focus();
}

const fromAddress = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
addEventListener("hashchange", () => go(fromAddress()));
document.getElementById("choices").addEventListener("submit", (event) => event.preventDefault());
go(fromAddress());
