//! The parts of Markdown that the tests look at: code blocks, headings, links, tables.

use std::collections::BTreeMap;

/// A fenced code block.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Block {
    /// What follows the opening fence.
    pub(crate) info: String,
    pub(crate) text: String,
    /// Line of the opening fence, from 1.
    pub(crate) line: usize,
}

/// Splits a page into the lines outside of code blocks, with their numbers, and the code blocks.
pub(crate) fn split(page: &str) -> (Vec<(usize, &str)>, Vec<Block>) {
    let mut prose = Vec::new();
    let mut blocks = Vec::new();
    let mut open: Option<(&str, Block)> = None;
    for (line, number) in page.lines().zip(1..) {
        let rest = line.trim_start();
        match &mut open {
            Some((fence, _)) if rest.trim_end() == *fence => {
                blocks.extend(open.take().map(|(_, block)| block));
            }
            Some((_, block)) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
            None if rest.starts_with("```") => {
                let info = rest.trim_start_matches('`');
                let block = Block {
                    info: info.trim().to_owned(),
                    line: number,
                    ..Block::default()
                };
                open = Some((&rest[..rest.len() - info.len()], block));
            }
            None => prose.push((number, line)),
        }
    }
    assert!(open.is_none(), "a code block without end: {open:?}");
    (prose, blocks)
}

/// Links of a page that are not in code, with their lines.
pub(crate) fn links(page: &str) -> Vec<(usize, String)> {
    let (prose, _) = split(page);
    let mut links = Vec::new();
    for (number, line) in prose {
        let line = without_code(line);
        let inline = line
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split_once(')'));
        let inline =
            inline.filter_map(|(target, _)| target.split_whitespace().next().map(str::to_owned));
        links.extend(inline.map(|target| (number, target)));
        let definition = line
            .strip_prefix('[')
            .and_then(|rest| rest.split_once("]: "));
        links.extend(definition.map(|(_, target)| (number, target.trim().to_owned())));
    }
    links
}

/// Without the spans between backticks.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// Headings outside of code: level and text, as it is written.
pub(crate) fn headings(page: &str) -> Vec<(usize, String)> {
    let (prose, _) = split(page);
    let headings = prose.into_iter().filter_map(|(_, line)| {
        let text = line.trim_start_matches('#');
        let level = line.len() - text.len();
        (1..=6).contains(&level).then_some(())?;
        Some((level, text.strip_prefix(' ')?.trim().to_owned()))
    });
    headings.collect()
}

/// The anchors that GitHub gives to the headings of a page.
pub(crate) fn anchors(page: &str) -> Vec<String> {
    let mut seen = BTreeMap::<String, usize>::new();
    let anchors = headings(page).into_iter().map(|(_, text)| {
        let kept = text
            .chars()
            .filter(|it| it.is_alphanumeric() || matches!(it, ' ' | '-' | '_'));
        let anchor: String = kept
            .flat_map(char::to_lowercase)
            .map(|it| if it == ' ' { '-' } else { it })
            .collect();
        let before = seen.entry(anchor.clone()).or_default();
        *before += 1;
        if *before == 1 {
            anchor
        } else {
            format!("{anchor}-{}", *before - 1)
        }
    });
    anchors.collect()
}

/// The section of a page below the heading `title` of level 2, up to the next one.
pub(crate) fn section<'a>(page: &'a str, title: &str) -> &'a str {
    let heading = format!("\n## {title}\n");
    let start = page
        .find(&heading)
        .unwrap_or_else(|| panic!("there is no section {title:?}"));
    page[start + heading.len() - 1..]
        .split("\n## ")
        .next()
        .unwrap()
}

/// Rows of the tables whose first column is headed `first`: their cells.
pub(crate) fn rows(page: &str, first: &str) -> Vec<Vec<String>> {
    let (prose, _) = split(page);
    let mut rows = Vec::new();
    let mut inside = false;
    for (_, line) in prose {
        let cells = cells(line);
        match cells.first() {
            None => inside = false,
            Some(cell) if cell == first => inside = true,
            Some(cell) if inside && !cell.starts_with("---") => rows.push(cells),
            Some(_) => {}
        }
    }
    rows
}

/// None in a line that is not of a table. `\|` is no border.
fn cells(line: &str) -> Vec<String> {
    let line = line.replace("\\|", "\u{1}");
    let Some(inner) = line
        .trim()
        .strip_prefix('|')
        .and_then(|rest| rest.strip_suffix('|'))
    else {
        return Vec::new();
    };
    inner
        .split('|')
        .map(|cell| cell.trim().replace('\u{1}', "|"))
        .collect()
}

/// All texts between backticks in a line or a cell.
pub(crate) fn code(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn code_blocks_links_headings_and_rows_are_found() {
    let page = "# A `b` c\n[x](y.md#z) `[no](link)` ![i](i.png \"t\")\n\n```sh norun\n\
                # no heading\n[no](link)\n```\n## A b: c\n## A b, c\n[r]: r.md\n\n| key | value |\n\
                |---|---|\n| `a` | 1 \\| 2 |\n\n| other |\n|---|\n| b |\n";
    let (_, blocks) = split(page);
    let block = Block {
        info: "sh norun".to_owned(),
        text: "# no heading\n[no](link)\n".to_owned(),
        line: 4,
    };
    assert_eq!(blocks, [block]);
    let found = links(page);
    let targets: Vec<&str> = found.iter().map(|(_, target)| target.as_str()).collect();
    assert_eq!(targets, ["y.md#z", "i.png", "r.md"]);
    assert_eq!(anchors(page), ["a-b-c", "a-b-c-1", "a-b-c-2"]);
    assert_eq!(rows(page, "key"), [["`a`", "1 | 2"]]);
    assert_eq!(section(page, "A b: c"), "");
    assert_eq!(code("`a` or `b`").collect::<Vec<_>>(), ["a", "b"]);
}
