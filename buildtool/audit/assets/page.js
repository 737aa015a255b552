// Brings the page to life: reads the data that lies in it, wires the controls. Nothing is loaded.

const element = (id) => document.getElementById(id);

function rowOf(cells) {
  const [path, isFile, layer, group, owner, kind, target, bytes, visible, nFiles] = cells;
  return { path, isFile, layer, group, owner, kind, target, bytes, visible, nFiles };
}

function drawLegend(treemap, rows) {
  const present = new Set(rows.map((row) => familyOf(row.kind).id));
  const items = [...FAMILIES, REST].filter((family) => present.has(family.id)).map((family) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = `k-${family.id}`;
    button.textContent = family.label;
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => {
      const lit = treemap.light(family.id);
      for (const one of items) one.setAttribute("aria-pressed", String(one.classList.contains(`k-${lit}`)));
    });
    return button;
  });
  element("legend").replaceChildren(...items);
}

function split(path) {
  const cut = path.lastIndexOf("/");
  return [path.slice(cut + 1), `/${path.slice(0, Math.max(cut, 0))}`];
}

function fileColumns(layerNames) {
  return [
    { title: "File", cells: (row) => split(row[0]), key: (row) => row[0] },
    { title: "Owner", cells: (row) => [row[3], layerNames[row[2]] ?? ""], key: (row) => row[3] },
    { title: "Size", cells: (row) => bytesText(row[1]), key: (row) => row[1], isNumber: true },
  ];
}

const PACKAGE_COLUMNS = [
  { title: "Package", cells: (row) => [row[1], row[2]], key: (row) => row[1].toLowerCase() },
  { title: "By", cells: (row) => [row[0], row[5] && `/${row[5]}`], key: (row) => row[0] },
  { title: "Size", cells: (row) => [bytesText(row[3]), `${row[4].toLocaleString("en")} files`], key: (row) => row[3], isNumber: true },
];

function wireList(name, columns, rows, { bytes, words }) {
  const box = element(name);
  const elements = {
    search: box.querySelector("input"),
    count: box.querySelector("output"),
    scroller: box.querySelector(".scroller"),
    table: box.querySelector("table"),
  };
  return new FileList(elements, columns, rows, { sortBy: 2, bytes, words });
}

async function copyText(button) {
  const source = button.parentElement.querySelector("pre");
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(source);
    button.textContent = "Selected: copy it";
  }
  setTimeout(() => {
    button.textContent = "Copy";
  }, 2000);
}

function start() {
  const page = JSON.parse(element("data").textContent);
  page.rows = page.rows.map(rowOf);
  if (page.rows.length) {
    const treemap = new Treemap(page, { map: element("map"), crumbs: element("crumbs"), detail: element("detail") });
    for (const choice of document.querySelectorAll("input[name=view]")) {
      choice.addEventListener("change", () => treemap.show(choice.value));
    }
    drawLegend(treemap, page.rows);
  }
  wireList("files", fileColumns(page.layerNames), page.files, {
    bytes: (row) => row[1],
    words: (row) => `${row[0]} ${row[3]}`.toLowerCase(),
  });
  wireList("packages", PACKAGE_COLUMNS, page.packages, {
    bytes: (row) => row[3],
    words: (row) => `${row[1]} ${row[2]} ${row[0]}`.toLowerCase(),
  });
  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", () => copyText(button));
  }
}

start();
