// Tables sort by a click on a heading, and show the rows that hold all words of a filter.
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, at) => row.cells[at].textContent.trim();
  heads.forEach((head, at) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const sign = down ? -1 : 1;
    const rows = [...body.rows].map((row) => [value(row, at), row]);
    const numeric = head.classList.contains("n");
    rows.sort(([a], [b]) => {
      if (!numeric) return sign * a.localeCompare(b);
      const [x, y] = [parseFloat(a), parseFloat(b)];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return sign * (x - y);
    });
    body.append(...rows.map(([, row]) => row));
  }));
}
for (const box of document.querySelectorAll("input[type=search]")) {
  const table = document.getElementById(box.dataset.table);
  const count = document.getElementById(box.dataset.count);
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${table.tBodies[0].rows.length} cells`;
  });
}
