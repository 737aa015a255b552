// A searchable, sortable table of thousands of rows: only the rows in view are in the document.

const ROW_PX = 44;
const AROUND = 8; // rows drawn above and below those in view

class FileList {
  /** `columns` are {title, cells(row) -> text or [text, text below], key(row) to sort by, isNumber}. */
  constructor(elements, columns, rows, { sortBy, bytes, words }) {
    Object.assign(this, { ...elements, columns, rows, bytes, words });
    this.sort = { column: sortBy, down: true };
    this.search.addEventListener("input", () => this.refresh());
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(this.scroller);
    this.head();
    this.refresh();
  }

  head() {
    const cells = this.columns.map((column, n) => {
      const cell = document.createElement("th");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = column.title;
      button.addEventListener("click", () => {
        this.sort = { column: n, down: this.sort.column === n ? !this.sort.down : Boolean(column.isNumber) };
        this.refresh();
      });
      cell.scope = "col";
      cell.className = column.isNumber ? "number" : "";
      cell.append(button);
      return cell;
    });
    this.table.tHead.rows[0].replaceChildren(...cells);
  }

  refresh() {
    const wanted = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.found = this.rows.filter((row) => wanted.every((word) => this.words(row).includes(word)));
    const { key } = this.columns[this.sort.column];
    const way = this.sort.down ? -1 : 1;
    this.found.sort((a, b) => way * (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0));
    [...this.table.tHead.rows[0].cells].forEach((cell, n) => {
      const mine = n === this.sort.column;
      cell.setAttribute("aria-sort", mine ? (this.sort.down ? "descending" : "ascending") : "none");
    });
    const sum = this.found.reduce((total, row) => total + this.bytes(row), 0);
    this.count.textContent = `${this.found.length.toLocaleString("en")} of ${this.rows.length.toLocaleString("en")} rows, ${bytesText(sum)}`;
    this.scroller.scrollTop = 0;
    this.draw();
  }

  draw() {
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW_PX) - AROUND);
    const last = Math.min(
      this.found.length,
      Math.ceil((this.scroller.scrollTop + this.scroller.clientHeight) / ROW_PX) + AROUND,
    );
    const rows = this.found.slice(first, last).map((row, n) => this.row(row, first + n));
    this.table.setAttribute("aria-rowcount", String(this.found.length + 1));
    this.table.tBodies[0].replaceChildren(spacer(first), ...rows, spacer(this.found.length - last));
  }

  row(row, n) {
    const line = document.createElement("tr");
    line.setAttribute("aria-rowindex", String(n + 2));
    line.append(
      ...this.columns.map((column) => {
        const cell = document.createElement("td");
        cell.className = column.isNumber ? "number" : "";
        for (const [at, text] of [column.cells(row)].flat().entries()) {
          const part = document.createElement(at ? "small" : "bdi");
          part.textContent = text;
          part.title = text;
          cell.append(part);
        }
        return cell;
      }),
    );
    return line;
  }
}

function spacer(rows) {
  const line = document.createElement("tr");
  line.className = "spacer";
  line.style.height = `${rows * ROW_PX}px`;
  line.setAttribute("aria-hidden", "true");
  return line;
}
