//! Splits shell commands into words, as far as the documentation needs it.

/// Splits `text` into simple commands of words: quotes are removed, redirections and comments left
/// out, variables and substitutions kept as they are written.
pub(crate) fn simple_commands(text: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut characters = text.chars().peekable();
    while let Some(&next) = characters.peek() {
        match next {
            '\n' | ';' | '|' | '&' | '(' | ')' => {
                characters.next();
                commands.push(Vec::new());
            }
            '#' => while characters.next_if(|it| *it != '\n').is_some() {},
            it if it.is_whitespace() => drop(characters.next()),
            _ => {
                let word = word(&mut characters);
                match word.trim_start_matches(|it: char| it.is_ascii_digit()) {
                    // The file of a redirection: in the same word, or the next one.
                    ">" | ">>" | "<" => {
                        while characters.next_if_eq(&' ').is_some() {}
                        self::word(&mut characters);
                    }
                    rest if rest.starts_with(['>', '<']) => {}
                    "\n" => {}
                    _ => commands.last_mut().unwrap().push(word),
                }
            }
        }
    }
    commands.retain(|words| !words.is_empty());
    commands
}

/// Takes the next word. An escaped end of line is a word of its own.
fn word(characters: &mut std::iter::Peekable<std::str::Chars<'_>>) -> String {
    let mut word = String::new();
    let mut quote = None;
    while let Some(&next) = characters.peek() {
        if quote.is_none()
            && (next.is_whitespace() || ";|&()".contains(next))
            && !word.ends_with('$')
        {
            break;
        }
        characters.next();
        match (quote, next) {
            (Some(open), _) if next == open => quote = None,
            (None, '\'' | '"') => quote = Some(next),
            (None, '\\') => word.extend(characters.next()),
            _ => word.push(next),
        }
    }
    word
}

#[test]
fn quotes_comments_redirections_and_ends_of_lines_are_understood() {
    let text =
        "a 'b c' \"d;e\" \\\n    f >>g 2>h # i 'j\n(umask 077; cat > k) && l | m=1 n *.x $O &\n";
    let commands = simple_commands(text);
    let expected: [&[&str]; 5] = [
        &["a", "b c", "d;e", "f"],
        &["umask", "077"],
        &["cat"],
        &["l"],
        &["m=1", "n", "*.x", "$O"],
    ];
    assert_eq!(
        commands,
        expected.map(|words| words
            .iter()
            .map(|word| (*word).to_owned())
            .collect::<Vec<_>>())
    );
}
