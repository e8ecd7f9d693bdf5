// The report page: sorts its table, opens folded parts, and shows images in a viewer in which arrow keys flip in place.
(() => {
  const each = (selector, act, within = document) => within.querySelectorAll(selector).forEach(act);

  // A click on a heading sorts by the first number of its cells, or by their text; another click reverses the order.
  each("table.sortable", (table) => {
    const heads = [...table.tHead.rows[0].cells], rows = table.tBodies[0];
    heads.forEach((head, place) => {
      const button = document.createElement("button");
      button.append(...head.childNodes);
      head.append(button);
      const value = (row) => row.cells[place].textContent.trim();
      const number = (row) => parseFloat(value(row).replaceAll(",", ""));
      button.addEventListener("click", () => {
        const way = head.ariaSort === "descending" ? 1 : -1;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.ariaSort = way > 0 ? "ascending" : "descending";
        const known = [...rows.rows].filter((row) => value(row) !== "-"), all = known.length && !known.some((row) => isNaN(number(row)));
        known.sort((a, b) => way * (all ? number(a) - number(b) : value(a).localeCompare(value(b))));
        rows.prepend(...known);
      });
    });
  });

  // Below each table: its cells to the clipboard, separated by tabs, or as a CSV file.
  each("[data-take]", (button) => button.addEventListener("click", async () => {
    const table = button.parentElement.previousElementSibling.querySelector("table");
    const cells = [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
    if (button.dataset.take === "copy") {
      await navigator.clipboard.writeText(cells.map((row) => row.join("\t")).join("\n"));
      button.textContent = "copied";
      return;
    }
    const quoted = cells.map((row) => row.map((cell) => `"${cell.replaceAll('"', '""')}"`).join(",")).join("\r\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([quoted], { type: "text/csv" }));
    link.download = "table.csv";
    link.click();
  }));

  // Links of the contents open what they lead to; paper has the definitions unfolded.
  const open = (target) => { if (target && target.matches("details")) target.open = true; };
  each("a[href^='#']", (link) => link.addEventListener("click", () => open(document.getElementById(link.hash.slice(1)))));
  open(document.getElementById(location.hash.slice(1)));
  addEventListener("beforeprint", () => each("details.printed", open));

  const viewer = document.getElementById("viewer"), stage = viewer.querySelector(".stage");
  let shown = null;
  const pictures = (frame) => frame.closest(".pictures");
  const tile = (frame) => frame.closest(".tile");
  const frames = (row) => [...row.querySelectorAll(".tile")].map((one) => one.querySelector(".frame"));
  const radios = () => [...pictures(shown).querySelectorAll("input[type=radio]")];
  const overlay = () => (radios().find((radio) => radio.checked) || { value: "none" }).value;

  // The overlay of differences shows the image of the row's first run over each image, subtracted by the browser.
  each(".prompt-row", (row) => {
    const [first, ...others] = frames(row), base = first && first.querySelector(".base");
    others.filter((frame) => frame && base).forEach((frame) => {
      const over = base.cloneNode();
      over.className = "over difference";
      over.alt = "difference from " + tile(first).dataset.run;
      frame.append(over);
    });
  });

  each(".pictures select", (select) =>
    select.addEventListener("change", () =>
      each(".gallery .prompt-row", (row) => {
        row.hidden = Boolean(select.value) && row.dataset.category !== select.value;
      }, pictures(select))));

  function show(frame) {
    shown = frame;
    stage.replaceChildren(...frame.cloneNode(true).children);
    viewer.querySelector("h4").textContent = tile(frame).dataset.run;
    viewer.querySelector(".prompt").textContent = frame.closest(".prompt-row").dataset.prompt;
    viewer.querySelector(".facts").textContent = tile(frame).dataset.facts;
    viewer.dataset.overlay = overlay();
  }

  function flip(across, down) {
    const rows = [...pictures(shown).querySelectorAll(".prompt-row:not([hidden])")], row = shown.closest(".prompt-row");
    let line = rows.indexOf(row), place = frames(row).indexOf(shown);
    const height = rows.length, width = frames(row).length;
    for (let tries = 0; tries < width * height; tries++) {
      place = (place + across + width) % width;
      line = (line + down + height) % height;
      const found = frames(rows[line])[place];
      if (found) return show(found);
    }
  }

  function nextOverlay() {
    const all = radios();
    if (all.length) all[(all.findIndex((radio) => radio.checked) + 1) % all.length].checked = true;
    viewer.dataset.overlay = overlay();
  }

  document.addEventListener("click", (event) => {
    const frame = event.target.closest(".pictures .frame");
    if (frame) {
      show(frame);
      viewer.showModal();
    } else if (event.target === viewer) viewer.close();
  });
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  viewer.addEventListener("keydown", (event) => {
    if (steps[event.key]) flip(...steps[event.key]);
    else if (event.key === "o") nextOverlay();
    else return;
    event.preventDefault();
  });
  each("[data-step]", (button) => button.addEventListener("click", () => flip(...steps[button.dataset.step])), viewer);
  viewer.querySelector("[data-overlay-next]").addEventListener("click", nextOverlay);
  viewer.addEventListener("close", () => shown && shown.focus());
})();
