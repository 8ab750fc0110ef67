// The trust table: sort by a column, filter by verdict, walk with the arrow keys.
"use strict";
(() => {
  const table = document.getElementById("trust");
  if (!table) return;
  const body = table.tBodies[0];
  const headers = [...table.querySelectorAll("thead th")];
  const sorter = document.getElementById("sorter");
  const status = document.getElementById("shown");
  const rows = () => [...body.rows];

  // --- sorting: a click turns ascending, descending, and back to the audit's order ---
  function compare(type, sign) {
    return (first, second) => {
      const a = first.key, b = second.key;
      if ((a === "") !== (b === "")) return a === "" ? 1 : -1; // no value: last, whichever way
      const order = type === "number" ? Math.sign(Number(a) - Number(b)) || 0 : a.localeCompare(b);
      return sign * order || first.place - second.place;
    };
  }

  function sort(column, direction) {
    headers.forEach((header, index) => header.setAttribute("aria-sort", index === column ? direction : "none"));
    const type = column === null ? "number" : headers[column].firstElementChild.dataset.type;
    const keyed = rows().map((row) => ({
      row,
      place: Number(row.dataset.place),
      key: column === null ? row.dataset.place : row.cells[column].dataset.key,
    }));
    keyed.sort(compare(type, direction === "descending" ? -1 : 1));
    body.append(...keyed.map((entry) => entry.row));
    sorter.value = column === null ? "" : String(column);
  }

  headers.forEach((header, column) => {
    header.firstElementChild.addEventListener("click", () => {
      const next = { none: "ascending", ascending: "descending", descending: "none" }[header.getAttribute("aria-sort")];
      sort(next === "none" ? null : column, next);
    });
  });
  sorter.addEventListener("change", () => {
    sort(sorter.value === "" ? null : Number(sorter.value), sorter.value === "" ? "none" : "descending");
  });

  // --- filtering ---
  const buttons = [...document.querySelectorAll("[data-filter]")];
  function filter(verdict) {
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.filter === verdict)));
    rows().forEach((row) => { row.hidden = verdict !== "all" && row.dataset.verdict !== verdict; });
    const count = rows().filter((row) => !row.hidden).length;
    status.textContent = verdict === "all" ? "" : `${count} of ${rows().length} shown`;
    if (current.closest("tr").hidden) enter(rows().find((row) => !row.hidden).cells[0], false);
  }
  buttons.forEach((button) => button.addEventListener("click", () => filter(button.dataset.filter)));

  // --- walking: one stop for the tab key, arrows inside ---
  let current = body.rows[0].cells[0];
  function enter(cell, focus = true) {
    current.tabIndex = -1;
    current = cell;
    current.tabIndex = 0;
    if (focus) current.focus();
  }
  rows().forEach((row) => [...row.cells].forEach((cell) => { cell.tabIndex = -1; }));
  enter(current, false);

  body.addEventListener("focusin", (event) => {
    const cell = event.target.closest("td, th");
    if (cell && cell !== current) enter(cell, false);
  });
  body.addEventListener("keydown", (event) => {
    const visible = rows().filter((row) => !row.hidden);
    const row = visible.indexOf(current.parentElement), column = current.cellIndex;
    const last = current.parentElement.cells.length - 1;
    const [down, across] = {
      ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1], Home: [0, -column], End: [0, last - column],
    }[event.key] || [0, 0];
    if (event.key === "Enter" && current.querySelector("a")) current.querySelector("a").click();
    const target = visible[row + down] && visible[row + down].cells[column + across];
    if ((down || across) && target) {
      event.preventDefault();
      enter(target);
    }
  });
})();
