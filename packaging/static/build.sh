# Part of packaging/build: the agent as one file that needs no libc of the machine.

# use_tools TARGET: exports the C compiler, the linker and the tools for one target.
use_tools() {
    local variable=${1//-/_} headers
    target_cflags=
    rustc --print target-libdir --target "$1" >/dev/null 2>&1 && [[ -d $(rustc --print target-libdir --target "$1") ]] ||
        fail "static needs Rust's library for $1: rustup target add $1"
    case $1 in
        "$(uname -m)"-unknown-linux-musl)
            command -v musl-gcc >/dev/null || fail "static needs musl-gcc: apt-get install musl-tools"
            export "CC_$variable=musl-gcc"
            objcopy=objcopy
            ;;
        aarch64-unknown-linux-musl)
            command -v aarch64-linux-gnu-gcc >/dev/null ||
                fail "static for aarch64 needs a cross compiler: apt-get install gcc-aarch64-linux-gnu"
            headers=/usr/include/aarch64-linux-musl
            [[ -d $headers ]] || fail "static for aarch64 needs $headers: dpkg --add-architecture arm64;" \
                "apt-get update; apt-get install musl-dev:arm64"
            export "CC_$variable=aarch64-linux-gnu-gcc"
            # Not glibc's headers, with their calls to checking functions that musl does not have.
            export "CFLAGS_$variable=-nostdinc -isystem $headers -isystem $(aarch64-linux-gnu-gcc -print-file-name=include)"
            target_cflags=CFLAGS_$variable
            export "CARGO_TARGET_${variable^^}_LINKER=aarch64-linux-gnu-gcc"
            objcopy=aarch64-linux-gnu-objcopy
            ;;
        *) fail "static: no C compiler is known here for $1 on $(uname -m)" ;;
    esac
}

for arch in "${arches[@]}"; do
    triple=$arch-unknown-linux-musl
    use_tools "$triple"
    build_with_cargo --package gw-agent --bin gw-agent --target "$triple"
    built=$target/packaging/$triple/$profile_folder/gw-agent
    headers=$(readelf --program-headers "$built")
    [[ $headers != *INTERP* ]] || fail "$built needs a dynamic linker"

    name=gw-agent-$version-$arch-linux
    folder=$work/static/$name
    split "$built" "$folder/gw-agent"
    describe_parts gw-agent "$folder/gw-agent" "$triple" "$name"
    install -d "$work/static/debug/$name-debug"
    mv "$folder/gw-agent.debug" "$work/static/debug/$name-debug/"
    install -m 644 LICENSE-APACHE LICENSE-MIT CHANGELOG.md packaging/examples/agent.toml \
        packaging/systemd/gw-agent.service "$folder"
    # Another architecture's program cannot write them here; they are the same.
    if [[ $arch == "$(uname -m)" ]]; then
        "$folder/gw-agent" manual "$work/static/manual"
        documentation man "$work/static/manual"
        rm "$work/static/manual/gateway.toml.5"
    fi
    if [[ -d $work/static/manual ]]; then
        cp -r "$work/static/manual" "$folder/manual"
    fi
    archive "$name.tar.gz" "$folder"
    archive "$name-debug.tar.gz" "$work/static/debug/$name-debug"
done
unset objcopy target_cflags
